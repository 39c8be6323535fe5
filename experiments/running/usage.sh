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
if [ ${#words[@]} -lt "$least" ] || { [ "$most" != any ] && [ ${#words[@]} -gt "$most" ]; }; then
    echo "error: usage: $(sed -n 's/^#     //p' "$0" | head -n 1)" >&2
    exit 2
fi
