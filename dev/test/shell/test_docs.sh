#!/bin/sh
# test_docs.sh -- runs the commands of README.md and dev/doc/*.md as printed, on the CPU, and checks the names on the pages.
#
# A block that opens with ```sh is run; the blocks of a page run in order and in one folder. Words after `sh` say what a block
# needs. A block is skipped, by name, if one of these words is gpu, network, hosts or slow, or a Python module that $PYTHON
# lacks. Blocks without a language are output, and hold no commands; a block that opens with ```c is a piece of a trainer.
#
# In the folder, ./train_llama3 is a script that stops each training after two steps, so that a page runs in seconds. `make`
# does not build the programs again. Run from the project's root after `make`.
. dev/test/lib.sh
pages="README.md dev/data/README.md dev/cuda/README.md $(ls dev/doc/*.md)"
python=$(command -v "${PYTHON:-python3}")
case $python in /*) ;; *) python=$root/$python ;; esac
wanted=${PAGES:-$pages} # PAGES="README.md": the commands of some

# --- names ---------------------------------------------------------------------------------------------------------------------

# every CHECK PATTERN: prints "PAGE: NAME" of each name on a page that the command CHECK refuses
every() {
    for page in $pages; do
        grep -oE -e "$2" "$page" | sort -u | while read -r name; do $1 "$name" || echo "$page: $name"; done
    done
}
none() { # none NAME: nothing was found
    if [ -s "$tmp/found" ]; then bad "$1" "$(head -n 5 "$tmp/found" | tr '\n' ';')"; else ok "$1"; fi
}

is_path() { # of the tree, or made by a command
    path=$(echo "$1" | tr -d '`')
    [ -e "$path" ] || case $path in *NAME*) ;; *) false ;; esac
}
is_flag() {
    field=$(echo "$1" | sed 's/^[^a-z]*//' | tr - _)
    grep -qE "^OPTION\([A-Z]+, ${field#no_}_?," llmc/run/cli/options.def ||
        grep -rqF -e "\"--$(echo "$field" | tr _ -)\"" dev --include='*.py' --include='*.[ch]' --include='*.cuh'
}
is_function() { grep -rqE "\b$(echo "$1" | tr -d '`()')\(" llmc dev -- *.c *.cu *.py; }
is_target() { grep -qE "^([^#=]* )?${1#*make }( [^=]*)?:( |\$)" Makefile dev/make/*.mk; }

# anchors PAGE: prints the anchors of its headings as GitHub makes them
anchors() { sed -n 's/^##* //p' "$1" | tr "[:upper:]" "[:lower:]" | sed 's/[^a-z0-9 _-]//g; s/ /-/g'; }
links() { # prints "PAGE: LINK" of each link that leads nowhere
    for page in $pages; do
        grep -oE '\]\([^)]+\)' "$page" | sed 's/^](//; s/)$//' | grep -v '^http' | while read -r link; do
            file=${link%%#*}
            file=${file:+$(dirname "$page")/$file}
            [ -e "${file:-$page}" ] || echo "$page: $link"
            case $link in *.md#* | '#'*) anchors "${file:-$page}" | grep -qx -e "${link#*#}" || echo "$page: $link" ;; esac
        done
    done
}

links >"$tmp/found"
none "every link leads to a file, and to a heading in it"
every is_path '`(llmc|dev)/[A-Za-z0-9_./-]+`' >"$tmp/found"
none "every path is in the tree"
every is_flag '(^|[`( ])`--[a-z0-9-]+' >"$tmp/found"
none "every flag is one of the trainers or scripts"
for page in $pages; do # also in commands that cannot run here
    sed -e ':more' -e '/\\$/{N;s/\\\n//;b more' -e '}' "$page" | sed -n 's/.*[.]\/train_llama3\(cu\)* //p' |
        grep -oE '(^| )--[a-z0-9-]+' | sort -u | while read -r name; do is_flag "$name" || echo "$page: $name"; done
done >"$tmp/found"
none "every flag of a command is one of the trainers"
every is_function '`[a-z0-9_]+\(\)`' >"$tmp/found"
none "every function is in the source"
every is_target '(`|^)make [a-z][a-z_0-9-]*' >"$tmp/found"
none "every target is in the Makefile or in dev/make"
for page in $pages; do
    awk -v page="$page" '/^```/ { inside = !inside; plain = $0 == "```" }
        inside && plain && /^(\.\/|make |python3? |sh )/ { print page ": " $0 }' "$page"
done >"$tmp/found"
none "commands stand in blocks that say sh"
grep -rnE '(^|[^A-Za-z_./$-])python [a-z0-9_/]*\.py' --include='*.md' --include='*.py' --include='*.[ch]' --include='*.cuh' \
    --include='*.def' README.md dev llmc *.py *.c *.cu >"$tmp/found"
none "every text calls Python python3: Debian has no python"
for page in $pages; do
    awk '/^```/ { inside = !inside; code = $0 == "```c"; next } inside && code' "$page" | while read -r code; do
        grep -qF -e "$code" train_llama3.c train_llama3.cu || echo "$page: $code"
    done
done >"$tmp/found"
none "every line of C is in a trainer"
grep -E '^\|.* = [0-9.]+ ' README.md | grep -oE '[0-9]{1,3}(,[0-9]{3})+' | while read -r figure; do
    grep -qF -e "$figure" dev/results/*.md || echo "$figure"
done >"$tmp/found"
none "every speed on README is in the results"
for room in llmc/* dev/[a-z]*; do
    [ ! -d "$room" ] || grep -qF "$room" README.md || echo "$room"
done >"$tmp/found"
none "every room of the house is in README"
for page in dev/doc/*.md; do
    [ "$page" = dev/doc/README.md ] || grep -qF "($(basename "$page"))" dev/doc/README.md || echo "$page"
done >"$tmp/found"
none "every page is in the index"
for page in $pages; do
    lines=$(wc -l <"$page") most=170
    ! grep -q '^<!-- zoo: ' "$page" || most=180 # a lesson, with the zoo's tables
    [ "$page" != README.md ] || most=200
    [ "$lines" -le $most ] || echo "$page: $lines lines"
done >"$tmp/found"
none "README has 200 lines at most, a lesson 180, a page 170"

# --- commands ------------------------------------------------------------------------------------------------------------------

# the programs of a page's folder
mkdir -p "$tmp/bin" "$tmp/new/dev/data/tinytales" && cd "$tmp/new" || exit 1
cat >"$tmp/bin/make" <<END
#!/bin/sh
exec $(command -v make) -o train_llama3 -o tokenize HAS_GPU= "\$@"
END
cat >"$tmp/bin/python3" <<END
#!/bin/sh
exec "$python" "\$@"
END
cat >train_llama3 <<END
#!/bin/sh
case " \$* " in *" --resume "*) steps=4 ;; *) steps=2 ;; esac
exec "$bin/train_llama3" "\$@" --stop-after \$steps --val-batches 1 --threads 1
END
chmod +x "$tmp/bin/make" "$tmp/bin/python3" train_llama3
cp "$bin/tokenize" .
for file in Makefile llmc train_llama3.c train_llama3.cu train_llama3.py test_llama3.cu; do ln -s "$root/$file" .; done
for file in "$root"/dev/*; do [ -e "dev/$(basename "$file")" ] || ln -s "$file" dev; done
cp "$root"/dev/data/*.* dev/data && cp "$root/dev/data/tinytales/tokenizer.json" dev/data/tinytales
PATH=$tmp/bin:$PATH

# the reader's own text, in the forms that the pages name; the default data set
make -s dev/data/tinytales/tinytales_train.bin >/dev/null 2>&1
build/tinytales --stories 400 --seed 1 -o mine.jsonl && build/tinytales --text --stories 400 --seed 1 -o mine.txt && gzip -k mine.txt

# missing WORDS: prints the needs of a block that are missing here
missing() {
    for need in "$@"; do
        case $need in
            gpu | network | hosts | slow) echo "$need" && return ;;
            *) python3 -c "import importlib.util as u; u.find_spec('$need') or exit(1)" || { echo "python3 has no $need" && return; } ;;
        esac
    done
}

for page in $wanted; do
    dir=$tmp/page
    rm -rf "$dir" && cp -r "$tmp/new" "$dir" && cd "$dir" || exit 1
    awk '/^```/ { inside = !inside; run = inside && $1 == "```sh"; if (run) { n++; print NR, substr($0, 7) >"needs." n }; next }
         run { print >"block." n }' n=0 "$root/$page"
    n=1
    while [ -e "needs.$n" ]; do
        read -r line needs <"needs.$n"
        name="$page:$line, $(head -n 1 "block.$n" | cut -c 1-70)"
        # shellcheck disable=SC2086  # words
        lacks=$(missing $needs)
        if [ -n "$lacks" ]; then
            skip "$name" "$lacks"
        elif timeout 100 sh -e "block.$n" >out.txt 2>&1; then
            ok "$name"
        else
            bad "$name" "its last line: $(tail -n 1 out.txt)"
        fi
        n=$((n + 1))
    done </dev/null
done
cd "$root" && summary
