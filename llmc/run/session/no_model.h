/* no_model.h -- ends the program where --model or --lora-base names no model: says what the name stands for, and what to give
 * instead. A cause has a hint of its own: a folder above the model, a file inside it, a name on the hub, a preset with a typing
 * error, a folder that is gone.
 */
#ifndef LLMC_NO_MODEL_H
#define LLMC_NO_MODEL_H

#include "llmc/base/utils.h"

#include "llmc/base/text.h"         // defines: edit_distance, is_hub_name, text_ends, text_plural, text_starts
#include "llmc/config.h"            // defines: presets, config_preset
#include "llmc/files/adapter.h"     // defines: ADAPTER_CONFIG
#include "llmc/files/checkpoint.h"  // defines: checkpoint_list
#include "llmc/files/folder.h"      // defines: folder_below, folder_has, folder_next, folder_of, file_name

#include <ctype.h>

/* Returns whether a folder holds a model or adapters. */
static inline bool holds_model(const char* dir) { return folder_has(dir, "config.json") || folder_has(dir, ADAPTER_CONFIG); }

/* Returns whether a folder holds checkpoints of a run. */
static inline bool holds_checkpoints(const char* dir) {
    uint64_t* steps = NULL;
    size_t count = 0;
    Error ignored = NO_ERROR;
    const bool ok = checkpoint_list(dir, &steps, &count, &ignored);
    free(steps);
    return ok && count > 0;
}

/* Looks for the folder in `dir` whose name is nearest to `word`, with fewer than `edits` typing errors. Writes its name, or "".
 * Returns whether there is a GGUF file. */
static inline bool folder_nearest(const char* dir, const char* word, int edits, char near[PATH_CAP]) {
    struct dirent* entry = NULL;
    Error ignored = NO_ERROR;
    DIR* d = opendir(dir);
    bool gguf = false;
    near[0] = 0;
    while (d && folder_next(d, dir, &entry, &ignored) && entry) {
        char path[PATH_CAP];
        const char* name = entry->d_name;
        const int distance = strcasecmp(word, name) == 0 ? 0 : edit_distance(word, name);
        gguf |= text_ends(name, ".gguf");
        if (distance >= edits || !path_join(path, dir, name, &ignored) || !is_directory(path)) { continue; }
        edits = distance;
        snprintf(near, PATH_CAP, "%s", strcmp(dir, ".") == 0 ? name : path);
    }
    if (d) { closedir(d); }
    return gguf;
}

/* Returns the preset that a name with a typing error or with capital letters means, or NULL. */
static inline const char* nearest_preset(const char* word, int edits, char lower[PATH_CAP]) {
    ModelConfig c;
    snprintf(lower, PATH_CAP, "%s", word);
    for (char* p = lower; *p; p++) { *p = (char)tolower((unsigned char)*p); }
    if (config_preset(&c, lower, 1)) { return lower; }
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++) {
        if (edit_distance(lower, presets[i].name) < edits) { return presets[i].name; }
    }
    return NULL;
}

// ends the program: `what` a name is instead of a model, and a hint
#define NO_MODEL(what, hint, ...) die("%s: %s " what "\n  hint: " hint, flag, name, __VA_ARGS__)
#define NO_MODEL_GGUF "--export writes GGUF, but no job reads it\n  hint: give the Hugging Face folder that it was made from"

/* Ends the program: the value of a flag is no model. */
LLMC_NORETURN static inline void die_of_no_model(const char* flag, const char* name) {
    static const char hub[] = "https://huggingface.co/";
    const bool address = text_starts(name, hub), there = file_exists(name), slash = strchr(name, '/') != NULL;
    const char *repo = address ? name + strlen(hub) : name, *stem = file_name(name);
    static const char* const models[] = {"config.json", ADAPTER_CONFIG, NULL};
    const int edits = 1 + (int)size_min(strlen(stem) / 3, 2);
    char dir[PATH_CAP], lower[PATH_CAP], near[PATH_CAP];
    const char* preset = there || slash ? NULL : nearest_preset(name, edits, lower);
    folder_of(name, dir);
    const bool gguf = folder_nearest(is_directory(name) ? name : dir, stem, edits, near);
    if (is_directory(name)) {
        const int count = folder_below(name, models, 2, near);
        if (count > 0) {
            NO_MODEL("holds no model itself, but %d folder%s with one", "did you mean %s?", count, text_plural(count), near);
        }
        if (gguf) { die("%s: %s holds a GGUF file: " NO_MODEL_GGUF, flag, name); }
        if (folder_has(name, "params.json")) {
            die("%s: %s holds a model in Meta's own format\n  hint: the hub has the same model in Hugging Face's format", flag,
                name);
        }
        die("%s: %s holds no checkpoint, wanted a folder step_NNNNNNNN in it, or a model with a config.json", flag, name);
    }
    if (there && text_ends(name, ".gguf")) { die("%s: %s is a GGUF file: " NO_MODEL_GGUF, flag, name); }
    if (there && (holds_model(dir) || holds_checkpoints(dir))) {
        NO_MODEL("is a file, wanted the folder that it lies in", "did you mean %s?", dir);
    }
    if (there) { die("%s: %s is a file, wanted a folder with config.json and model.safetensors", flag, name); }
    if (preset || near[0]) {
        NO_MODEL("is %s", "did you mean %s?", slash ? "no folder" : "neither a folder nor a preset", preset ? preset : near);
    }
    if (is_hub_name(repo) && (address || !is_directory(dir))) {
        snprintf(dir, sizeof dir, "models/%s", file_name(repo));
        if (is_directory(dir)) { NO_MODEL("is no folder here", "did you mean %s?", dir); }
        NO_MODEL("is no folder here", "python3 dev/data/model.py %s downloads it from the hub to %s", repo, dir);
    }
    if (name[0] == '~') { die("%s: %s is no folder\n  hint: the shell replaces ~ behind a blank, not behind =", flag, name); }
    if (slash) { die("%s: %s is missing, wanted a model's folder", flag, name); }
    NO_MODEL(
        "is neither a folder nor a preset, wanted a Hugging Face folder, dN, llama3.2-1b, llama3.2-3b, llama3.1-8b or "
        "llama3.1-70b",
        "python3 dev/data/model.py %s downloads a folder of the Hugging Face hub", "OWNER/NAME");
}

#endif
