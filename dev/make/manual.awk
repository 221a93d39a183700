# manual.awk -- makes the manual page of the trainers or, with -v completion=1, what bash completes. Each line of its input is a flag:
# kind~field~other name~default~group~value~help, as the preprocessor writes llmc/run/cli/options.def.
function plain(text) { gsub(/-/, "\\-", text); return text }
function bold(text) { return "\\fB" plain(text) "\\fR" }
BEGIN {
    FS = "~"
    page = ".TH TRAIN_LLAMA3 1\n.SH NAME\ntrain_llama3, train_llama3cu \\- train Llama 3 on the CPU or on GPUs\n.SH SYNOPSIS\n" \
        ".B train_llama3\n[" bold("--flag") " \\fIvalue\\fR]... [" bold("@") "\\fIFILE\\fR]...\n.SH DESCRIPTION\n" \
        "Trains a Llama 3 model, or generates, chats and evaluates. " bold("train_llama3cu") " does the same on GPUs.\n" \
        bold("@") "\\fIFILE\\fR stands for the flags in FILE, a flag a line; later flags win."
}
{
    gsub(/" "/, "")
    gsub(/"/, "")
    sub(/_$/, "", $2)
    gsub(/_/, "-", $2)
    flag = "--" $2
    flags = flags " " flag
    if ($1 ~ /STRING|RESUME/) { files = files "|" flag }
    page = page ($5 == group ? "" : "\n.SH " toupper(group = $5)) "\n.TP\n" bold(flag) \
        ($3 ? ", " bold((length($3) > 2 ? "--" : "-") $3) : "") ($6 ? " \\fI" plain($6) "\\fR" : "") "\n\\&" plain($7) \
        ($4 == "" || $4 == "NULL" || $1 == "SWITCH" ? "" : " (default " plain($4) ")")
    if ($1 == "CHOICE" && gsub(/\|/, " ", $6)) { cases = cases "\n        " flag ") words=\"" $6 "\" ;;" }
}
END {
    if (!completion) { print page "\n.SH SEE ALSO\nThe manual is the folder dev/doc of the source."; exit }
    print "_train_llama3() {\n    local words=\"" flags "\"\n    case ${COMP_WORDS[COMP_CWORD - 1]} in" cases
    print "        " substr(files, 2) ") return ;;\n    esac"
    print "    COMPREPLY=($(compgen -W \"$words\" -- \"${COMP_WORDS[COMP_CWORD]}\"))\n}"
    print "complete -o default -F _train_llama3 train_llama3 train_llama3cu"
}
