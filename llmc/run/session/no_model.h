/* no_model.h -- ends the program where --model or --lora-base names no model: says what the name stands for, and what to give
 * instead. A cause has a hint of its own: a folder above the model, a file inside it, a name on the hub, a preset with a typing
 * error, a folder that is gone.
 */
#ifndef LLMC_NO_MODEL_H
#define LLMC_NO_MODEL_H

#include "llmc/base/utils.h"

#include "llmc/base/text.h"         // defines: edit_distance, is_hub_name, text_ends, text_plural
#include "llmc/config.h"            // defines: presets, config_preset
#include "llmc/files/adapter.h"     // defines: ADAPTER_CONFIG
#include "llmc/files/checkpoint.h"  // defines: checkpoint_list
#include "llmc/files/folder.h"      // defines: folder_has, folder_next, folder_of, file_name

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

/* Looks for what --model takes in the folders of `dir`, and of those that hold none, down to `levels`. Writes the last in the
 * order of names and numbers (checkpoint-1000 follows checkpoint-500) to `last`, and returns how many there are. */
static inline int models_below(const char* dir, int levels, char last[PATH_CAP]) {
    struct dirent** names = NULL;
    Error ignored = NO_ERROR;
    const int listed = scandir(dir, &names, NULL, versionsort);
    int count = 0;
    for (int i = 0; i < listed; i++) {
        char path[PATH_CAP];
        if (names[i]->d_name[0] != '.' && path_join(path, dir, names[i]->d_name, &ignored) && is_directory(path)) {
            const bool found = holds_model(path) || holds_checkpoints(path);
            if (found) { snprintf(last, PATH_CAP, "%s", path); }
            const int deeper = levels - (strcmp(names[i]->d_name, "snapshots") != 0);  // the hub's cache has one floor more
            count += found ? 1 : deeper > 0 ? models_below(path, deeper, last) : 0;
        }
        free(names[i]);
    }
    free(names);
    return count;
}

/* Returns whether a name in the folder ends with `end`. */
static inline bool folder_has_end(const char* dir, const char* end) {
    struct dirent* entry = NULL;
    Error ignored = NO_ERROR;
    DIR* d = opendir(dir);
    bool found = false;
    while (d && !found && folder_next(d, dir, &entry, &ignored) && entry) { found = text_ends(entry->d_name, end); }
    if (d) { closedir(d); }
    return found;
}

#define NO_MODEL_GGUF "--export writes GGUF, but no job reads it\n  hint: give the Hugging Face folder that it was made from"

/* Ends the program because of a folder that is no model. */
LLMC_NORETURN static inline void die_of_folder(const char* flag, const char* dir) {
    char last[PATH_CAP];
    const int count = models_below(dir, 2, last);
    if (count > 0) {
        die("%s: %s holds no model itself, but %d folder%s with one\n  hint: did you mean %s?", flag, dir, count,
            text_plural(count), last);
    }
    if (folder_has_end(dir, ".gguf")) { die("%s: %s holds a GGUF file: " NO_MODEL_GGUF, flag, dir); }
    if (folder_has_end(dir, ".pth") || folder_has(dir, "params.json")) {
        die("%s: %s holds Meta's own format\n  hint: the hub has the same model in Hugging Face's, which is wanted", flag, dir);
    }
    if (folder_has_end(dir, ".safetensors")) { die("%s: %s holds weights, but no config.json, wanted both", flag, dir); }
    die("%s: %s holds no checkpoint, wanted a folder step_NNNNNNNN in it, or a model with a config.json", flag, dir);
}

/* Ends the program because of a file, where a folder is wanted. */
LLMC_NORETURN static inline void die_of_file(const char* flag, const char* path) {
    char dir[PATH_CAP];
    folder_of(path, dir);
    if (text_ends(path, ".gguf")) { die("%s: %s is a GGUF file: " NO_MODEL_GGUF, flag, path); }
    if (holds_model(dir) || holds_checkpoints(dir)) {
        die("%s: %s is a file, wanted the folder that it lies in\n  hint: did you mean %s?", flag, path, dir);
    }
    die("%s: %s is a file, wanted a folder with config.json and model.safetensors", flag, path);
}

/* Writes the preset, or the folder in `dir`, that a name with a typing error means; returns whether there is one. */
static inline bool nearest_name(const char* word, const char* dir, char out[PATH_CAP]) {
    char lower[256];
    ModelConfig c;
    struct dirent* entry = NULL;
    Error ignored = NO_ERROR;
    int best = 1 + (int)size_min(strlen(word) / 3, 2);
    snprintf(lower, sizeof lower, "%s", word);
    for (char* p = lower; *p; p++) { *p = (char)tolower((unsigned char)*p); }
    const bool here = strcmp(dir, ".") == 0;  // presets have no folder
    if (here && config_preset(&c, lower, 1)) { return snprintf(out, PATH_CAP, "%s", lower) > 0; }
    for (size_t i = 0; here && i < sizeof presets / sizeof *presets; i++) {
        if (edit_distance(lower, presets[i].name) < best) { return snprintf(out, PATH_CAP, "%s", presets[i].name) > 0; }
    }
    DIR* d = opendir(dir);
    bool found = false;
    while (d && folder_next(d, dir, &entry, &ignored) && entry) {
        char path[PATH_CAP];
        const int distance = strcasecmp(word, entry->d_name) == 0 ? 0 : edit_distance(word, entry->d_name);
        if (distance >= best || !path_join(path, dir, entry->d_name, &ignored) || !is_directory(path)) { continue; }
        best = distance;
        found = snprintf(out, PATH_CAP, "%s", here ? entry->d_name : path) > 0;
    }
    if (d) { closedir(d); }
    return found;
}

/* Ends the program because of a name that is not there. */
LLMC_NORETURN static inline void die_of_missing(const char* flag, const char* name) {
    static const char hub[] = "https://huggingface.co/";
    char dir[PATH_CAP], near[PATH_CAP];
    const bool address = strncmp(name, hub, strlen(hub)) == 0, slash = strchr(name, '/') != NULL;
    const char* repo = address ? name + strlen(hub) : name;
    folder_of(name, dir);
    if (nearest_name(file_name(name), dir, near)) {
        die("%s: %s is %s\n  hint: did you mean %s?", flag, name, slash ? "no folder" : "neither a folder nor a preset", near);
    }
    if (is_hub_name(repo) && (address || !is_directory(dir))) {
        snprintf(near, sizeof near, "models/%s", file_name(repo));
        if (is_directory(near)) { die("%s: %s is no folder here\n  hint: did you mean %s?", flag, name, near); }
        die("%s: %s is no folder here\n  hint: python3 dev/data/model.py %s downloads it from the hub to models/%s", flag, name,
            repo, file_name(repo));
    }
    if (name[0] == '~') { die("%s: %s is no folder\n  hint: the shell replaces ~ behind a blank, not behind =", flag, name); }
    if (slash) { die("%s: %s is missing, wanted a model's folder", flag, name); }
    die("%s: %s is neither a folder nor a preset, wanted a Hugging Face folder, dN, llama3.2-1b, llama3.2-3b, "
        "llama3.1-8b or llama3.1-70b\n"
        "  hint: python3 dev/data/model.py OWNER/NAME downloads a folder of the Hugging Face hub",
        flag, name);
}

/* Ends the program: the flag's value is no model. */
LLMC_NORETURN static inline void die_of_no_model(const char* flag, const char* name) {
    if (is_directory(name)) { die_of_folder(flag, name); }
    if (file_exists(name)) { die_of_file(flag, name); }
    die_of_missing(flag, name);
}

#endif
