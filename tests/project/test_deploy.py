"""The files of docker/ name existing options, ports, variables, extras, versions and metrics, and match each other."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from tools import command_line

from lmpool.broker.server import Server
from lmpool.embedded import server_binary
from lmpool.protocol.keys import Keys
from lmpool.web.app import Demand, demand_route
from lmpool.workers.settings import WorkerSettings
from tests.project.test_operations import exported
from tests.support.pool import until

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
KUBERNETES = DOCKER / "kubernetes"
MAIN = DOCKER / "Dockerfile"
DOCKERFILES = [MAIN, DOCKER / "vllm.Dockerfile", DOCKER / "sglang.Dockerfile"]
COMPOSE = [DOCKER / f"compose{part}.yaml" for part in ("", ".secure", ".cuda", ".two-gpus")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
UID = 10001


def read(path: Path) -> Any:
    (document,) = yaml.safe_load_all(path.read_text("utf-8"))
    return document


def manifests() -> Iterator[dict[str, Any]]:
    """All Kubernetes objects in the files of docker/."""
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        if path.name != "kustomization.yaml":
            yield from yaml.safe_load_all(path.read_text("utf-8"))


def workloads() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The Kubernetes objects that run pods, each with its container; a LeaderWorkerSet is one object per template."""
    for item in manifests():
        templates = [item["spec"]["template"]] if item["kind"] in ("Deployment", "StatefulSet") else []
        if item["kind"] == "LeaderWorkerSet":
            templates = [item["spec"]["leaderWorkerTemplate"][f"{role}Template"] for role in ("leader", "worker")]
        for template in templates:
            (container,) = template["spec"]["containers"]
            yield {**item, "spec": {**item["spec"], "template": template}}, container


def stages(path: Path) -> dict[str, str]:
    """Stages of a Dockerfile: name -> instructions; the name "" stands for an unnamed last stage."""
    parts = re.split(r"^FROM \S+(?: AS (\S+))?$", path.read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip([name or "" for name in parts[1::2]], parts[2::2], strict=True))


def entry_point(target: str) -> list[str]:
    engine = DOCKER / f"{target}.Dockerfile"
    text = stages(engine)[""] if engine.exists() else stages(MAIN)[target]
    (line,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    words: list[str] = json.loads(line)
    return words


def options_of(words: list[str]) -> set[str]:
    """The options that the command in a command line accepts."""
    commands = dict(command_line.all_commands())
    called = next(name for name in (" ".join(words[:3]), " ".join(words[:2]), words[0]) if name in commands)
    options = command_line.options_of(commands[called])
    return {name for option in options for name in (*option.opts, *option.secondary_opts)} | {"--help"}


def two_gpus() -> dict[str, Any]:
    """The service of compose.two-gpus.yaml."""
    (service,) = read(DOCKER / "compose.two-gpus.yaml")["services"].values()
    assert service["image"].startswith("lmpool-vllm:")
    return dict(service)


def assert_is_called_rightly(words: list[str]) -> None:
    if words == ["lmpool"]:
        return
    assert words[0] == "lmpool"
    given = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    assert given <= options_of(words), words


def called() -> Iterator[list[str]]:
    """Every command line in docker/ that calls `lmpool`."""
    for path in DOCKERFILES:
        for line in re.findall(r"^ENTRYPOINT (.*)$", path.read_text("utf-8"), re.MULTILINE):
            yield json.loads(line)
    for service in read(DOCKER / "compose.yaml")["services"].values():
        if "build" in service:
            yield [*entry_point(service["build"]["target"]), *service.get("command", [])]
    yield [*entry_point("vllm"), *two_gpus()["command"]]
    for _, container in workloads():
        if container["image"].startswith("lmpool-"):
            yield [*entry_point(container["image"].removeprefix("lmpool-")), *container.get("args", [])]


def test_every_command_and_option_exists() -> None:
    lines = list(called())
    assert len(lines) >= 12
    for words in lines:
        assert_is_called_rightly(words)
    with pytest.raises(AssertionError):
        assert_is_called_rightly(["lmpool", "worker", "--no-such-option"])


def test_extras_exist() -> None:
    named = re.findall(r"^ARG \w+_EXTRAS=(\S+)$|environment\.sh ([a-z][\w,-]*)$", MAIN.read_text("utf-8"), re.MULTILINE)
    named += re.findall(r"(?m)^\s+\w+_EXTRAS: ()(\S+)$", (DOCKER / "compose.yaml").read_text("utf-8"))
    names = {name for pair in named for text in pair for name in text.split(",") if name}
    assert {"hf", "trie", "web", "bulk"} <= names <= EXTRAS.keys()


def test_variables_of_containers_are_read_by_the_code() -> None:
    named: set[str] = set()
    for path in DOCKERFILES:
        named |= set(re.findall(r"(?:^ENV |^ {4})([A-Z_]+)=", path.read_text("utf-8"), re.MULTILINE))
    for service in read(DOCKER / "compose.yaml")["services"].values():
        named |= set(service.get("environment", {}))
    for _, container in workloads():
        named |= {variable["name"] for variable in container.get("env", [])}
    ours = {name for name in named if name.startswith("LMPOOL_")}
    code = "".join(
        path.read_text("utf-8") for part in ("shared", "producer", "workers") for path in (ROOT / part).rglob("*.py")
    )
    assert {"LMPOOL_REDIS_URL", "LMPOOL_SHM_DIR", "LMPOOL_WEB_TOKEN"} <= ours
    assert {name for name in ours if f'"{name}"' not in code} == set()


def test_the_example_has_every_setting_of_the_compose_files_with_its_default() -> None:
    used: dict[str, str] = {}
    for path in COMPOSE:
        for name, default in re.findall(r"\$\{(\w+):[-?]([^}]*)\}", path.read_text("utf-8")):
            assert used.setdefault(name, default) == default, name
    used["LMPOOL_WEB_TOKEN"] = ""
    lines = (DOCKER / ".env.example").read_text("utf-8").splitlines()
    assert dict(line.split("=", 1) for line in lines if line and not line.startswith("#")) == used


def test_the_server_of_compose_is_reached_by_a_socket_in_a_volume_and_by_no_port(tmp_path: Path) -> None:
    services = read(DOCKER / "compose.yaml")["services"]
    (volume,) = [line.removesuffix(":/data") for line in services["server"]["volumes"]]
    words = [word.replace("/data", str(tmp_path)) for word in services["server"]["command"]]
    words = [server_binary(), *(re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in words[1:])]
    process = subprocess.Popen([*words, "--dir", str(tmp_path)], stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(unix_socket_path=str(tmp_path / "redis.sock")) as client:

            def answers() -> bool:
                with suppress(redis.ConnectionError):  # The socket exists before the server listens.
                    return bool(client.ping())
                return False

            until(answers, "the server answers")
            assert client.config_get("port") == {"port": "0"}
            assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "volatile-lru"
        assert (tmp_path / "redis.sock").stat().st_mode & 0o777 == 0o777, "the pool's containers run as another user"
    finally:
        process.kill()
        process.wait()
    for name, service in services.items():
        if url := service.get("environment", {}).get("LMPOOL_REDIS_URL"):
            assert re.fullmatch(r"\$\{\w+:-unix:///run/server/redis\.sock\}", url), name
            mounts = [mount for mount in service["volumes"] if isinstance(mount, dict)]
            assert (volume, "/run/server", True) in [(m["source"], m["target"], m.get("read_only")) for m in mounts]


def test_metrics_of_compose_are_not_on_the_bridge_unless_they_are_asked_for() -> None:
    services = read(DOCKER / "compose.yaml")["services"]
    for name in ("worker", "trie-worker"):
        words = [*entry_point(services[name]["build"]["target"]), *services[name]["command"]]
        last = max(at for at, word in enumerate(words) if word == "--metrics-host")
        assert words[last + 1] == "${POOL_METRICS_HOST:-127.0.0.1}", name


def test_the_worker_with_two_gpus_differs_from_the_worker_of_compose_in_its_model_and_devices() -> None:
    worker, service = read(DOCKER / "compose.yaml")["services"]["worker"], two_gpus()
    different = {name for name in worker.keys() - {"build"} if service.get(name) != worker[name]}
    assert different == {"image", "command", "shm_size", "tmpfs"}
    assert service["tmpfs"] == ["/tmp:exec"]
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    gpus = len(devices["device_ids"])
    assert parallel_size(service["command"], "--tensor-parallel-size") == gpus
    (shm_gb,) = re.findall(r":-(\d+)gb", service["shm_size"])
    assert int(shm_gb) * 1024 >= shm_mib(gpus)


def parallel_size(words: list[str], option: str) -> int:
    return int(words[words.index(option) + 1]) if option in words else 1


def shm_mib(processes: int) -> int:
    """MiB of /dev/shm that vLLM's message queues take on a machine with `processes` processes of a model."""
    return 240 * processes + 184


def test_each_service_of_compose_uses_the_server_as_the_user_of_its_part() -> None:
    services = read(DOCKER / "compose.yaml")["services"]
    urls = {name: service.get("environment", {}).get("LMPOOL_REDIS_URL", "") for name, service in services.items()}
    users = {name: url[2:].partition("_URL:-")[0] for name, url in urls.items() if url}
    assert users == {
        "worker": "POOL_WORKER",
        "trie-worker": "POOL_TRIE_WORKER",
        "web": "POOL_WEB",
        "client": "POOL_PRODUCER",
        "bulk": "POOL_BATCH",
    }


def test_jobs_may_use_the_folder_of_files_and_docker_does_not_make_it_as_root() -> None:
    bulk = read(DOCKER / "compose.yaml")["services"]["bulk"]
    (files,) = [mount for mount in bulk["volumes"] if "/files" in str(mount)]
    assert bulk["environment"]["LMPOOL_BATCH_FILES"] == files["target"]
    assert files["bind"] == {"create_host_path": False}
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    assert f"install -d -o {UID} -g {UID} docker/files" in page


def test_versions_agree() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (DOCKER / "requirements.txt").read_text("utf-8"), re.MULTILINE))
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    assert {name for name in pins.keys() & tested.keys() if pins[name] != tested[name]} == set()
    wanted = [
        *PROJECT["dependencies"],
        *(
            line
            for name in ("worker", "hf", "lora", "trie", "web", "bulk", "metrics", "parquet", "text")
            for line in EXTRAS[name]
        ),
    ]
    direct = {re.split(r"[\[<>=;]", line)[0].strip() for line in wanted} - {"lmpool"}
    assert direct <= pins.keys()
    (torch,) = re.findall(r"^ARG TORCH=(\S+)\+cpu$", MAIN.read_text("utf-8"), re.MULTILINE)
    assert torch == pins["torch"] == tested["torch"]
    for path in DOCKERFILES:
        text = path.read_text("utf-8")
        assert set(re.findall(r"^ARG VERSION=(\S+)$", text, re.MULTILINE)) == {PROJECT["version"]}
        # Dockerfiles name the version of each base image, never "latest".
        assert all(
            re.search(r":\S*\d", base)
            for base in re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
            if "slim" not in base
        )
    assert {image["newTag"] for image in read(KUBERNETES / "kustomization.yaml")["images"]} == {PROJECT["version"]}


def test_images_are_made_of_wheels_whose_hashes_are_known() -> None:
    lines = (DOCKER / "requirements.txt").read_text("utf-8").splitlines()
    pins = [line.removeprefix("# bulk: ") for line in lines if "==" in line]
    without = {line.partition("==")[0] for line in pins if not re.search(r"( --hash=sha256:[0-9a-f]{64})+$", line)}
    assert without == {"torch"}, "run `make pin-hashes`"
    script = (DOCKER / "environment.sh").read_text("utf-8")
    # With --no-deps, pip installs only the listed packages. Of these packages only torch has no hash.
    calls = re.findall(r"\binstall ((?:--|\$).*)$", script.partition("\n}\n")[2], re.MULTILINE)
    hashed = ["--no-deps --require-hashes --requirement /tmp/needed", '--no-deps --no-index "$wheel[$extras]"']
    assert [call for call in calls if "torch" not in call and "--dry-run" not in call] == hashed
    assert re.findall(r"pip install (?:(?!\n).)*", MAIN.read_text("utf-8")) == [
        "pip install --quiet --no-cache-dir --require-hashes --requirement /tmp/hatchling"
    ]


def test_what_is_run_is_nobody_and_is_asked_where_it_answers() -> None:
    for path in DOCKERFILES:
        for name, text in stages(path).items():
            assert set(re.findall(r"^USER (\S+)$", text, re.MULTILINE)) <= {"0:0", f"{UID}:{UID}"}
            if "/readyz" in text:
                (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)/readyz", text)
                assert f"EXPOSE {port}\n" in text, name
                assert re.search(rf'"--(metrics-)?port", "{port}"', text), name
    assert "STOPSIGNAL SIGTERM" in stages(MAIN)["runtime"]
    ports = {"worker": 9100, "vllm": 9100, "trie": 9100, "web": 8642}
    for item, container in workloads():
        pod = item["spec"]["template"]["spec"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert pod["securityContext"]["runAsNonRoot"]
        if target := ports.get(container["image"].removeprefix("lmpool-")):
            assert pod["securityContext"]["runAsUser"] == UID
            if container["name"] == "follower":  # It has no port: its leader reports the health of the whole worker.
                continue
            assert [port["containerPort"] for port in container["ports"] if port["name"] != "rows"] == [target]
            assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
            assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_keep_their_caches_where_a_pod_can_write(engine: str) -> None:
    environment = dict(re.findall(r"\b([A-Z_]+)=(/\S+)", stages(DOCKER / f"{engine}.Dockerfile")[""]))
    workers = [container for _, container in workloads() if container["image"] in ("lmpool-worker", f"lmpool-{engine}")]
    assert workers
    for container in workers:
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {environment["HOME"], environment["HF_HOME"], environment["LMPOOL_SHM_DIR"]} <= mounts


def test_a_drain_may_take_as_long_as_the_longest_step() -> None:
    settings = WorkerSettings()
    for item, container in workloads():
        if container["image"] in ("lmpool-worker", "lmpool-trie", "lmpool-vllm"):
            grace_s = item["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
            assert grace_s > settings.step_timeout_s + settings.lease_s


def test_a_rollout_that_cannot_finish_is_said_to_have_failed_and_no_slow_load_is() -> None:
    for item, container in workloads():
        if item["kind"] == "Deployment" and container["image"] in ("lmpool-worker", "lmpool-vllm"):
            probe = container["startupProbe"]
            assert item["spec"]["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]
    assert "### Other weights\n" in (ROOT / "docs" / "deploy.md").read_text("utf-8")


def test_manifests_fit_one_another() -> None:
    for folder in (KUBERNETES, *(path for path in KUBERNETES.iterdir() if path.is_dir())):
        there = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert set(read(folder / "kustomization.yaml")["resources"]) == there
    pods = [item["spec"]["template"]["metadata"]["labels"] for item, _ in workloads()]
    for item in manifests():
        selector = (
            item["spec"].get("selector", {})
            if item["kind"] in ("Service", "Deployment", "StatefulSet", "PodDisruptionBudget")
            else {}
        )
        wanted = selector.get("matchLabels", selector)
        assert any(wanted.items() <= labels.items() for labels in pods), item
    volumes = [(item, container) for item, container in workloads()]
    for item, container in volumes:
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in item["spec"]["template"]["spec"]["volumes"]
        }


def test_pods_reach_the_server_and_the_dns_and_workers_the_hub_and_nothing_else() -> None:
    policies = {item["metadata"]["name"]: item["spec"] for item in manifests() if item["kind"] == "NetworkPolicy"}
    assert policies["nobody"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}, (
        "what is not allowed is denied"
    )
    out = {name: spec for name, spec in policies.items() if "egress" in spec}
    assert out.keys() == {"to-server", "clients-to-server", "clients-to-workers", "hub", "pods-of-a-worker"}
    (rows,) = out["clients-to-workers"]["egress"]
    assert [port["port"] for port in rows["ports"]] == [7600]
    (worker,) = [container for item, container in workloads() if item["metadata"]["name"] == "worker-smollm2"]
    two_gpus, *_ = yaml.safe_load_all((KUBERNETES / "two-gpus" / "qwen3-32b.yaml").read_text("utf-8"))
    two_pods = read(KUBERNETES / "two-pods" / "qwen3-235b.yaml")["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    specs = two_gpus["spec"]["template"]["spec"], two_pods["spec"]
    for container in (worker, *(spec["containers"][0] for spec in specs)):
        assert "--direct-address :7600" in " ".join(container["args"])
        assert {"name": "rows", "containerPort": 7600} in container["ports"]
    (values,) = [rule["values"] for rule in out["to-server"]["podSelector"]["matchExpressions"]]
    pods = {item["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] for item, _ in workloads()}
    assert set(values) == pods - {"server"}
    for name in ("to-server", "clients-to-server"):
        server, dns = out[name]["egress"]
        assert [peer.keys() for peer in server["to"]] == [{"podSelector"}], "in this namespace"
        assert [port["port"] for port in server["ports"]] == [6379]
        assert {port["port"] for port in dns["ports"]} == {53}
    ((peer,),) = [rule["to"] for rule in out["hub"]["egress"]]
    blocked = [ip_network(block) for block in peer["ipBlock"]["except"]]
    for address in ("10.96.0.1", "172.17.0.1", "192.168.1.1", "169.254.169.254"):
        assert any(ip_address(address) in block for block in blocked), address


def test_a_worker_of_several_devices_has_a_gpu_and_enough_shared_memory_for_each_process() -> None:
    spread = [
        (item, container) for item, container in workloads() if "--tensor-parallel-size" in container.get("args", [])
    ]
    assert {item["kind"] for item, _ in spread} == {"Deployment", "LeaderWorkerSet"}
    for item, container in spread:
        sizes = [parallel_size(container["args"], f"--{kind}-parallel-size") for kind in ("tensor", "pipeline")]
        pods = item["spec"].get("leaderWorkerTemplate", {}).get("size", 1)
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert gpus * pods == sizes[0] * sizes[1]
        (shm,) = [volume for volume in item["spec"]["template"]["spec"]["volumes"] if volume["name"] == "shm"]
        (gib,) = re.findall(r"^(\d+)Gi$", shm["emptyDir"]["sizeLimit"])
        assert int(gib) * 1024 >= shm_mib(gpus)


def test_the_pods_of_one_worker_start_together_and_outlive_the_drain_of_their_leader() -> None:
    (group,) = [item for item in manifests() if item["kind"] == "LeaderWorkerSet"]
    spec = group["spec"]["leaderWorkerTemplate"]
    assert (group["spec"]["startupPolicy"], spec["restartPolicy"]) == ("LeaderCreated", "RecreateGroupOnPodRestart")
    (leader,), (follower,) = (spec[f"{role}Template"]["spec"]["containers"] for role in ("leader", "worker"))
    assert leader["args"] == follower["args"]
    options = dict(pair.split("=") for pair in leader["args"][leader["args"].index("--engine-args") + 1].split())
    assert options == {
        "nnodes": "$(LWS_GROUP_SIZE)",
        "node_rank": "$(LWS_WORKER_INDEX)",
        "master_addr": "$(LWS_LEADER_ADDRESS)",
    }
    settings, sleep = WorkerSettings(), follower["lifecycle"]["preStop"]["sleep"]
    grace_s = spec["workerTemplate"]["spec"]["terminationGracePeriodSeconds"]
    assert settings.step_timeout_s + settings.lease_s < sleep["seconds"] < grace_s
    (policy,) = [item["spec"] for item in manifests() if item["metadata"]["name"] == "pods-of-a-worker"]
    pods = {"matchLabels": {"leaderworkerset.sigs.k8s.io/name": group["metadata"]["name"]}}
    assert policy["podSelector"] == pods
    assert policy["ingress"] == [{"from": [{"podSelector": pods}]}]
    assert policy["egress"] == [{"to": [{"podSelector": pods}]}]


def test_the_secrets_of_the_cluster_are_files_and_in_no_argument(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8").partition("## A cluster: Kubernetes")[2]
    assert "--from-literal" not in page
    way, create, *_ = re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "redis").symlink_to(DOCKER / "redis")
    subprocess.run(["bash", "-euo", "pipefail", "-c", way], cwd=tmp_path, check=True)
    users = (tmp_path / "secure/users.acl").read_text("utf-8")
    urls = tmp_path / "secure/urls"
    for path in urls.iterdir():
        assert path.stat().st_mode & 0o077 == 0
        if path.name != "web-token":
            role, password = re.fullmatch(r"redis://([\w-]+):(\w+)@server:6379/0", path.read_text()).groups()  # type: ignore[union-attr]
            assert role == path.name
            assert f"user {role} on #{sha256(password.encode()).hexdigest()} " in users
    assert "SHA256" not in users
    given = {name.rpartition("/")[2] for name in re.findall(r"--from-file=(\S+)", create)} - {"users.acl"}
    wanted = {entry["valueFrom"]["secretKeyRef"]["key"] for _, container in workloads()
              for entry in container.get("env", []) if "valueFrom" in entry}  # fmt: skip
    assert given == wanted
    assert given <= {path.name for path in urls.iterdir()}


def test_the_autoscaler_asks_for_what_there_is() -> None:
    (scaled,) = [item for item in manifests() if item["kind"] == "ScaledObject"]
    names = {item["metadata"]["name"] for item, _ in workloads()}
    assert scaled["spec"]["scaleTargetRef"]["name"] in names
    triggers = {trigger["type"]: trigger for trigger in scaled["spec"]["triggers"]}
    assert triggers.keys() == {"metrics-api", "prometheus"}
    from_none, to_many = triggers["metrics-api"]["metadata"], triggers["prometheus"]
    assert from_none["valueLocation"] in Demand._fields
    path = re.sub(r"^http://web\.lmpool\.svc:8642", "", from_none["url"])
    assert demand_route(Server("redis://localhost"), Keys()).path_regex.match(path)
    (metric,) = re.findall(r"lmpool_\w+", to_many["metadata"]["query"])
    assert metric in exported()
    # Every worker exports the drain time of the whole model, so the autoscaler must not add up the values of workers.
    assert to_many["metricType"] == "Value"
    # The autoscaler adds workers of one model only.
    (worker,) = [
        container
        for item, container in workloads()
        if item["metadata"]["name"] == scaled["spec"]["scaleTargetRef"]["name"]
    ]
    model = worker["args"][worker["args"].index("--name") + 1]
    assert f'model="{model}"' in to_many["metadata"]["query"]
    assert path.endswith(f"/{model}")


def test_no_file_of_a_checkout_gets_into_an_image_unless_it_is_named() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if not line.startswith("#")]
    assert ignored[0] == "*"
    let_through = {line.removeprefix("!") for line in ignored[1:] if line.startswith("!")}
    copied = {
        word
        for line in re.findall(r"^COPY (docker/.*) \S+$", MAIN.read_text("utf-8"), re.MULTILINE)
        for word in line.split()
    }
    parts = {"shared", "producer", "workers", "testing"}
    assert let_through == copied | parts | {"LICENSE", "README.md", "pyproject.toml"}
    assert {name for name in let_through if not (ROOT / name).exists()} == set()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder `docker` after the steps of docs/deploy.md for users and certificates."""
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    (way,) = re.findall(r"^```sh\n(mkdir -p secure/tls/.*?)^```$", page, re.DOTALL | re.MULTILINE)
    folder = tmp_path_factory.mktemp("docker")
    (folder / "redis").symlink_to(DOCKER / "redis")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", way], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def addresses(secured: Path) -> dict[str, str]:
    """Server addresses that the steps have written: name of the setting -> URL."""
    return dict(line.split("=", 1) for line in (secured / ".env").read_text("utf-8").splitlines())


def seen(secured: Path, service: str) -> set[str]:
    """The paths in a container of the files below POOL_SECURE and in docker/ that are mounted into the container."""
    found = set()
    for volume in read(DOCKER / "compose.secure.yaml")["services"][service]["volumes"]:
        source, target = re.sub(r"\$\{POOL_SECURE:-([^}]*)\}", r"\1", volume).split(":")[:2]
        if source.startswith("."):
            whole = secured / source
            assert whole.exists(), volume
            files = [path for path in whole.rglob("*") if path.is_file()] if whole.is_dir() else [whole]
            found |= {f"{target}{str(path).removeprefix(str(whole))}" for path in files}
    return found


def test_the_users_and_certificates_of_the_page_are_those_that_compose_wants(secured: Path) -> None:
    users = (secured / "secure/users.acl").read_text("utf-8")
    shipped = (DOCKER / "redis/users.acl").read_text("utf-8")
    assert len(re.findall(r" on #[0-9a-f]{64} ", users)) == shipped.count(" on #SHA256-OF-THE-PASSWORD-OF-")
    assert "SHA256" not in users
    settings = addresses(secured)
    assert settings.keys() == {
        "POOL_WORKER_URL",
        "POOL_TRIE_WORKER_URL",
        "POOL_WEB_URL",
        "POOL_PRODUCER_URL",
        "POOL_BATCH_URL",
    }
    for url in settings.values():
        assert url.startswith("rediss://")
        assert "@server:6379/0?ssl_ca_certs=/etc/lmpool/tls/ca.crt" in url


def test_containers_see_the_keys_that_they_need_and_the_servers_is_seen_by_the_server_alone(secured: Path) -> None:
    services = read(DOCKER / "compose.secure.yaml")["services"]
    named = set(re.findall(r"/etc/lmpool/\S+", (DOCKER / "redis/redis.conf").read_text("utf-8")))
    named |= {word for word in services["server"]["healthcheck"]["test"] if word.startswith("/")}
    assert len(named) == 7
    assert named <= seen(secured, "server")
    (of_clients,) = {frozenset(re.findall(r"/etc/lmpool/[^&]+", url)) for url in addresses(secured).values()}
    assert len(of_clients) == 3
    clients = services.keys() - {"server"}
    assert clients == {
        name
        for name, service in read(DOCKER / "compose.yaml")["services"].items()
        if "LMPOOL_REDIS_URL" in str(service)
    }
    for name in clients:
        assert seen(secured, name) == of_clients, name
    assert not list(secured.rglob("ca.key"))


def test_certificates_are_for_their_side_and_of_the_authority_that_both_sides_have(secured: Path) -> None:
    for side in ("server", "client"):
        folder = secured / "secure/tls" / side
        command = ["openssl", "verify", "-x509_strict", "-CAfile", "ca.crt", "-purpose", f"ssl{side}", f"{side}.crt"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_nobody_can_log_in_to_the_board_with_a_password_that_everybody_knows() -> None:
    environment = read(DOCKER / "compose.yaml")["services"]["grafana"]["environment"]
    has_administrator = environment.get("GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION") != "true"
    required = re.fullmatch(r"\$\{\w+:\?.*\}", environment.get("GF_SECURITY_ADMIN_PASSWORD", ""))
    assert required or not has_administrator
    # Disable logins of users that an earlier start has stored in Grafana's volume.
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
