# manual.awk -- makes the manual page of the trainers from llmc/run/cli/options.def or, with -v completion=1, what bash completes.
function plain(text) { gsub(/-/, "\\-", text); return text }
function bold(text) { return "\\fB" plain(text) "\\fR" }
!completion && NR == 1 {
    print ".TH TRAIN_LLAMA3 1\n.SH NAME\ntrain_llama3, train_llama3cu \\- train Llama 3 on the CPU or on GPUs"
    print ".SH SYNOPSIS\n.B train_llama3\n[" bold("--flag") " \\fIvalue\\fR]... [" bold("@") "\\fIFILE\\fR]...\n.SH DESCRIPTION"
    print "Trains a Llama 3 model, or generates, chats and evaluates. " bold("train_llama3cu") " does the same on GPUs."
    print bold("@") "\\fIFILE\\fR stands for the flags in FILE, a flag a line; later flags win."
}
/^OPTION\(/ { text = "" }
/^OPTION\(/, /"\)$/ {
    sub(/^ +/, "")
    text = text ~ /"$/ ? substr(text, 1, length(text) - 1) substr($0, 2) : text $0
    if ($0 !~ /"\)$/) { next }
    n = split(text, s, "\"")  # s[2] other names, s[4] the default unless it is NULL; from the end: help, value, group
    split(text, word, /[(, ]+/)
    sub(/_$/, "", word[3])
    gsub(/_/, "-", word[3])
    flags = flags " --" word[3]
    if (word[2] == "CHOICE") { cases = cases "\n        --" word[3] ") words=\"" s[n - 3] "\" ;;" }
    else if (word[2] ~ /STRING|RESUME/) { files = files "|--" word[3] }
    if (completion) { next }
    if (s[n - 5] != group) { print ".SH " toupper(group = s[n - 5]) }
    print ".TP\n" bold("--" word[3]) (s[2] ? ", " bold((s[2] ~ /^...?/ && length(s[2]) > 2 ? "--" : "-") s[2]) : "") \
        (s[n - 3] ? " \\fI" plain(s[n - 3]) "\\fR" : "") "\n\\&" plain(s[n - 1]) (n > 10 && s[4] != "" && word[2] != "SWITCH" ? " (default " plain(s[4]) ")" : "")
}
END {
    if (!completion) {
        print ".SH SEE ALSO\nThe manual is the folder dev/doc of the source."
    } else {
        gsub(/\|/, " ", cases)
        print "_train_llama3() {\n    local words=\"" flags "\"\n    case ${COMP_WORDS[COMP_CWORD - 1]} in" cases
        print "        " substr(files, 2) ") return ;;\n    esac"
        print "    COMPREPLY=($(compgen -W \"$words\" -- \"${COMP_WORDS[COMP_CWORD]}\"))\n}"
        print "complete -o default -F _train_llama3 train_llama3 train_llama3cu"
    }
}
