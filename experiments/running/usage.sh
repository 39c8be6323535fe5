# Sourced first by every script: --help prints the script's opening comment, words that do not fit are refused.
#     source usage.sh LEAST MOST "$@"      MOST: how many words it takes, or any
least=$1 most=$2
shift 2
case "${1-}" in
    -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) echo "error: unknown flag $1; see bash $0 --help" >&2; exit 2 ;;
esac
if [ $# -lt "$least" ] || { [ "$most" != any ] && [ $# -gt "$most" ]; }; then
    echo "error: usage: $(sed -n 's/^#     //p' "$0" | head -n 1)" >&2
    exit 2
fi
