/* side_files.h -- copies the other files of a model's folder into every checkpoint: tokenizer files, chat templates, licences,
 * the model card.
 *
 * They are read once, when the run starts, and kept in memory: the folder may be removed during the run. Only regular files
 * on a short list of names are taken. A link is followed only within the folder, or into the blobs of the download cache
 * that holds the folder: no private file may end up in a published checkpoint. Files that decide the ids of texts are followed
 * anywhere, as tokenizer.json is. One warning names all files that are left out: a run does not end for a licence.
 */
#ifndef LLMC_SIDE_FILES_H
#define LLMC_SIDE_FILES_H

#include "llmc/base/utils.h"

#include <fnmatch.h>
#include <limits.h>

#include "llmc/files/folder.h"

enum { SIDE_FILE_MAX = 64 << 20, SIDE_FILES_MAX = 256 << 20 };  // bytes of one file, and of all together

typedef struct {
    char name[256];  // relative to the checkpoint's folder
    char* data;
    size_t size;
} SideFile;

typedef struct {
    SideFile* items;
    size_t count;
    size_t bytes;
} SideFiles;

static inline void side_files_free(SideFiles* files) {
    for (size_t i = 0; i < files->count; i++) { free(files->items[i].data); }
    free(files->items);
    memset(files, 0, sizeof *files);
}

static inline bool is_side_file(const char* name) {
    static const char* const names[] = {"tokenizer*",        "special_tokens_map.json",
                                        "added_tokens.json", "vocab.json",
                                        "merges.txt",        "chat_template*",
                                        "README.md",         "LICENSE*",
                                        "LICENCE*",          "COPYING*",
                                        "NOTICE*",           "USE_POLICY*"};
    if (fnmatch("*.safetensors", name, 0) == 0) { return false; }  // loaders would mistake it for weights
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (fnmatch(names[i], name, FNM_CASEFOLD) == 0) { return true; }
    }
    return false;
}

/* Returns whether `file` is in `folder` or below it; both are real paths. */
static inline bool is_below(const char* file, const char* folder) {
    const size_t n = strlen(folder);
    return strncmp(file, folder, n) == 0 && file[n] == '/';
}

/* Returns whether a file decides the ids of texts. The program has read it, and without it the folder says something else. */
static inline bool side_file_decides(const char* name) {
    static const char* const names[] = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                                        "added_tokens.json", "chat_template.jinja"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i]) == 0) { return true; }
    }
    return false;
}

/* Writes the real path of a file into `real` (PATH_MAX bytes); fails if the file is a link to elsewhere, unless it decides ids.
 * A download cache has folders NAME/snapshots/COMMIT full of links into NAME/blobs. */
static inline bool side_file_resolve(const char* folder, const char* path, char* real, Error* e) {
    char inside[PATH_MAX], blobs[PATH_MAX], cache[PATH_CAP];
    if (!path_join(cache, folder, "../../blobs", e)) { return false; }
    if (!realpath(folder, inside) || !realpath(path, real)) { return fail(e, "%s: cannot open: %s", path, strerror(errno)); }
    if (is_below(real, inside) || (realpath(cache, blobs) && is_below(real, blobs))) { return true; }
    if (side_file_decides(file_name(path))) { return true; }
    return fail(e, "%s: is a link out of its folder, wanted a file in it", path);
}

/* Returns whether a tokenizer.model is tiktoken's text ("IQ== 0"), not SentencePiece's binary. */
static inline bool is_tiktoken(const char* data, size_t size) {
    const char* space = (const char*)memchr(data, ' ', size_min(size, 8));
    return space && space > data && space[-1] == '=';
}

/* Reads one file and adds it to the list. Meta's tokenizer.model (tiktoken's text) goes into original/, where Meta keeps it:
 * converters mistake a file at the top level for a SentencePiece file and stop. */
static inline bool side_files_add(SideFiles* files, const char* folder, const char* name, Error* e) {
    char path[PATH_CAP], real[PATH_MAX];
    size_t size = 0;
    if (!path_join(path, folder, name, e) || !side_file_resolve(folder, path, real, e)) { return false; }
    char* data = read_file(real, &size, size_min(SIDE_FILE_MAX, SIDE_FILES_MAX - files->bytes), e);
    if (!data) { return false; }
    files->items = (SideFile*)xrealloc(files->items, (files->count + 1) * sizeof(SideFile));
    SideFile* file = &files->items[files->count++];
    const bool tiktoken = strcmp(name, "tokenizer.model") == 0 && is_tiktoken(data, size);
    snprintf(file->name, sizeof file->name, "%s", tiktoken ? "original/tokenizer.model" : name);
    file->data = data;
    file->size = size;
    files->bytes += size;
    return true;
}

static inline bool side_files_have(const SideFiles* files, const char* name) {
    for (size_t i = 0; i < files->count; i++) {
        if (strcmp(files->items[i].name, name) == 0) { return true; }
    }
    return false;
}

/* Adds a file, or the reason why it is left out to `reasons`, a text of at most `cap` bytes. */
static inline void side_files_try(SideFiles* files, const char* folder, const char* name, char* reasons, size_t cap) {
    Error e = NO_ERROR;
    const size_t used = strlen(reasons);
    if (!side_files_add(files, folder, name, &e)) { snprintf(reasons + used, cap - used, "%s%s", used ? "; " : "", e.msg); }
}

/* Adds the side files of a folder, or, with `sub`, the templates in this folder of it. */
static inline void side_files_add_all(SideFiles* files, const char* folder, const char* sub, char* reasons, size_t cap) {
    char path[PATH_CAP], name[256];
    Error e = NO_ERROR;
    struct dirent* entry = NULL;
    if (!path_join(path, folder, sub, &e)) { return; }
    DIR* d = opendir(path);
    bool ok = d || fail(&e, "%s: cannot open the folder: %s", folder, strerror(errno));
    while (ok && (ok = folder_next(d, path, &entry, &e)) && entry) {
        const bool fits = snprintf(name, sizeof name, "%s%s%s", sub, sub[0] ? "/" : "", entry->d_name) < (int)sizeof name;
        if (fits && (sub[0] ? fnmatch("*.jinja", entry->d_name, 0) == 0 : is_side_file(name))) {
            side_files_try(files, folder, name, reasons, cap);
        }
    }
    if (d) { closedir(d); }
    if (!ok) { warn("%s: checkpoints will lack files of this folder", e.msg); }
}

/* Reads the side files of a folder. Free with side_files_free(). */
static inline SideFiles side_files_read(const char* folder) {
    static const char original[] = "original/tokenizer.model", templates[] = "additional_chat_templates";
    SideFiles files = {NULL, 0, 0};
    char reasons[4096] = "";
    side_files_add_all(&files, folder, "", reasons, sizeof reasons);
    if (folder_has(folder, templates)) { side_files_add_all(&files, folder, templates, reasons, sizeof reasons); }
    if (folder_has(folder, original) && !side_files_have(&files, original)) {
        side_files_try(&files, folder, original, reasons, sizeof reasons);
    }
    if (reasons[0]) { warn("checkpoints will not have: %s", reasons); }
    return files;
}

/* Writes the side files into a checkpoint's folder, except files that exist already. */
static inline void side_files_write(const SideFiles* files, const char* folder) {
    for (size_t i = 0; i < files->count; i++) {
        const SideFile* file = &files->items[i];
        char path[PATH_CAP] = "", sub[PATH_CAP];
        Error e = NO_ERROR;
        bool ok = path_join(path, folder, file->name, &e);
        if (ok && file_exists(path)) { continue; }
        if (ok) { folder_of(path, sub); }
        ok = ok && (!strchr(file->name, '/') || make_directories(sub, &e)) && write_file(path, file->data, file->size, &e);
        if (!ok) {
            warn("%s: this checkpoint will not have this file", e.msg);
            unlink(path);  // nor an empty one
        }
    }
}

#endif
