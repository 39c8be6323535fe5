# Sourced first by every script: --help prints the script's opening comment, words that do not fit are refused.
#     source usage.sh LEAST MOST "$@"      MOST: how many words it takes before the first --flag, or any
# Sets words and flags, what comes before the first --flag and from it on; here, the working folder.
least=$1 most=$2
shift 2
here=$PWD words=() flags=()
case "${1-}" in
    -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
while [ $# -gt 0 ] && [[ "$1" != --* ]]; do
    words+=("$1")
    shift
done
flags=("$@")
takes_flags=1
if [ "$most" = 0 ] || { [ "$least" -gt 0 ] && [ ${#words[@]} -eq 0 ]; }; then takes_flags=""; fi
if [ -z "$takes_flags" ] && [ ${#flags[@]} -gt 0 ]; then
    echo "error: unknown flag ${flags[0]}; see bash $0 --help" >&2
    exit 2
fi
# A flag is known where the Python script, or the flags that scripts share, name it
folder=$(dirname "${BASH_SOURCE[0]}")/..
script=$(sed -n 's/^run_script \([a-z_0-9]*[.]py\).*/\1/p' "$0")
for flag in ${flags[@]+"${flags[@]}"}; do
    name=${flag%%=*}
    name=${name#--}
    if [[ "$flag" = --* ]] && ! grep -qF -e "\"--$name\"" -e "\"${name#no-}\"" "$folder/$script" "$folder/running/cli.py"; then
        echo "error: unknown flag --$name; see bash $0 --help" >&2
        exit 2
    fi
done
if [ ${#words[@]} -lt "$least" ] || { [ "$most" != any ] && [ ${#words[@]} -gt "$most" ]; }; then
    echo "error: usage: $(sed -n 's/^#     //p' "$0" | head -n 1)" >&2
    exit 2
fi
