#!/bin/sh
# Create the environment of an image in /opt/lmpool: the wheel with some extras, all versions pinned, without files that no
# program reads at run time. Package indices and their passwords come from a secret, /etc/pip.conf.
#
#   environment.sh EXTRAS [TORCH [INDEX]]
#
# EXTRAS are the extras of lmpool. TORCH is a version of torch with its build, such as 2.13.0+cpu. INDEX is its package index.
set -eu
extras=$1 torch=${2:-} index=${3:-}
constraints=/src/docker/requirements.txt
# arq needs an older redis-py than the other extras.
case $extras in
    *bulk*) sed '/^redis==/d; s/^# bulk: //' $constraints > /tmp/constraints && constraints=/tmp/constraints ;;
esac

install() {
    /opt/build/bin/pip --python /opt/lmpool/bin/python install --quiet --no-cache-dir --no-compile \
        --disable-pip-version-check "$@"
}

python3 -m venv --without-pip /opt/lmpool
# Install the exact build of torch first, so that no package installs another build. A GPU build takes its requirements
# from the same index, without hashes. The requirements of the CPU build are installed below, with hashes.
case $torch in
    '') ;;
    *+cpu) install ${index:+--index-url "$index"} --no-deps "torch==$torch" ;;
    *) install ${index:+--index-url "$index"} "torch==$torch" ;;
esac
wheel=$(echo /wheels/lmpool-*.whl)
# pip resolves the versions first. Then it installs exactly these wheels with their hashes; a missing hash ends the build.
sed 's/ --hash=.*//' "$constraints" > /tmp/versions
install --dry-run --only-binary :all: --report /tmp/report --constraint /tmp/versions "$wheel[$extras]"
python3 - "$constraints" > /tmp/needed <<'EOF'
import json, re, sys

pins = {line.partition("==")[0]: line.strip() for line in open(sys.argv[1])}
for item in json.load(open("/tmp/report"))["install"]:
    name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
    if name != "lmpool":
        print(pins.get(name, f"{name}=={item['metadata']['version']}"))
EOF
install --no-deps --require-hashes --requirement /tmp/needed
install --no-deps --no-index "$wheel[$extras]"

packages=$(/opt/lmpool/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
find "$packages" -type d -name tests -prune -exec rm -rf {} +
# Remove headers and static libraries: the images have no compiler.
rm -rf "$packages/torch/include" "$packages/torch/share"
find "$packages" -name '*.a' -delete
# Compile the packages now, because containers cannot write here. Ignore errors: some files are for other versions of Python.
/opt/lmpool/bin/python -m compileall -q --invalidation-mode unchecked-hash "$packages" >/dev/null || true
