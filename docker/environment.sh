#!/bin/sh
# Make the environment of an image in /opt/lmpool: the wheel with some of its extras, all versions pinned, and no file that
# nothing reads when it runs. Names of indices and passwords for them come from a secret, /etc/pip.conf, never from here.
#
#   environment.sh EXTRAS [TORCH [INDEX]]
#
# EXTRAS as in `lmpool[EXTRAS]`. TORCH is a version with its build, as 2.13.0+cpu; INDEX a package index that has it.
set -eu
extras=$1 torch=${2:-} index=${3:-}
constraints=/src/docker/requirements.txt
# arq needs an older redis-py than everything else is tested with first.
case $extras in
    *bulk*) sed '/^redis==/d; s/^# bulk: //' $constraints > /tmp/constraints && constraints=/tmp/constraints ;;
esac

install() {
    /opt/build/bin/pip --python /opt/lmpool/bin/python install --quiet --no-cache-dir --no-compile \
        --disable-pip-version-check "$@"
}

python3 -m venv --without-pip /opt/lmpool
# First and by its exact build, so that no other package brings another torch. The packages of a build for GPUs come from the same
# index, without hashes; those of the build for CPUs are installed below, with hashes.
case $torch in
    '') ;;
    *+cpu) install ${index:+--index-url "$index"} --no-deps "torch==$torch" ;;
    *) install ${index:+--index-url "$index"} "torch==$torch" ;;
esac
wheel=$(echo /wheels/lmpool-*.whl)
# pip chooses by the versions, and then installs exactly that, each wheel with its hash; one without a hash ends the build.
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
# Headers, and what links programs with torch: images have no compiler.
rm -rf "$packages/torch/include" "$packages/torch/share"
find "$packages" -name '*.a' -delete
# Once, for no container can write it. Some packages have files for other versions of Python, which do not compile.
/opt/lmpool/bin/python -m compileall -q --invalidation-mode unchecked-hash "$packages" >/dev/null || true
