"""What is deployed is locked down, and installs what the tests run with."""

import re
import shlex
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.cli.test_documented import DEPLOY, ROOT, served

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
HOME = re.search(r"^WORKDIR (\S+)$", DOCKERFILE, re.M).group(1)
CACHES = re.findall(r"^(?:ENV| )\s*(?:HF_HOME|TRITON_CACHE_DIR)=(\S+)", DOCKERFILE, re.M)


@pytest.fixture(scope="module")
def kubernetes():
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    found = {document["kind"]: document["spec"] for document in documents}
    assert len(found) == len(documents)
    return found


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_the_image_is_made_of_what_is_pinned():
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.M)
    assert bases
    assert all(re.fullmatch(r"\S+:\d+\.\d+\.\d+-\S+@sha256:[0-9a-f]{64}", base) for base in bases)
    assert "constraints.txt" in re.search(r"^COPY (.*) /src/$", DOCKERFILE, re.M).group(1).split()
    assert "PIP_CONSTRAINT=/tmp/constraints.txt pip install" in DOCKERFILE
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.M):
        assert all(f"!{name}" in ignored for name in line.split()), "docker would not find it"


def test_pins_are_within_the_bounds_and_none_is_missing():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["server"], *extras["gpu"]]
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    for text in needed:
        requirement = Requirement(text)
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), (text, version)


@pytest.mark.parametrize(("name", "unsafe"), [("jinja2", "3.1.5"), ("starlette", "1.2.1")])
def test_releases_with_known_holes_are_not_taken(name, unsafe):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    (bound,) = [each for each in map(Requirement, needed) if each.name == name]
    assert not bound.specifier.contains(unsafe)


def test_kubernetes_gives_the_server_no_more_than_it_needs(kubernetes):
    pod = kubernetes["Deployment"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_what_is_written_has_a_place_where_the_root_is_read_only(kubernetes, compose):
    needed = {"/tmp", "/dev/shm", HOME, "/cache"}
    assert len(CACHES) == 2
    assert all(path.startswith("/cache/") for path in CACHES)
    pod = kubernetes["Deployment"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert set(mounts) == needed
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts.values())
    service = compose["services"]["milepost"]
    assert service["read_only"]
    places = [each.split(":")[0] for each in service["tmpfs"]]
    places += [each.split(":")[1] for each in service["volumes"]]
    assert {*places, "/dev/shm"} == needed, "docker makes /dev/shm itself"


def test_compose_gives_the_server_no_more_than_it_needs(compose):
    service = compose["services"]["milepost"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_only_http_is_open_to_others_in_a_cluster(kubernetes):
    policy, pods = kubernetes["NetworkPolicy"], kubernetes["Deployment"]["selector"]
    (container,) = kubernetes["Deployment"]["template"]["spec"]["containers"]
    assert policy["podSelector"] == pods
    assert policy["policyTypes"] == ["Ingress"]
    from_all = [rule for rule in policy["ingress"] if "from" not in rule]
    assert [rule["ports"] for rule in from_all] == [[{"port": "http"}]]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": served([])[0].port}
    others = [rule["from"] for rule in policy["ingress"] if "from" in rule]
    assert others == [[{"podSelector": pods}]]


def test_operators_have_a_key_of_their_own_everywhere(kubernetes, compose, monkeypatch):
    (container,) = kubernetes["Deployment"]["template"]["spec"]["containers"]
    secrets = {each["name"]: each["valueFrom"]["secretKeyRef"]["key"] for each in container["env"]}
    assert secrets == {"MILEPOST_API_KEY": "api-key", "MILEPOST_ADMIN_KEY": "admin-key"}
    for name, key in secrets.items():
        monkeypatch.setenv(name, key)
    server, _ = served(container["args"])
    assert (server.api_key, server.admin_key) == (["api-key"], ["admin-key"])
    for name in secrets:
        monkeypatch.delenv(name)
    server, _ = served(compose["services"]["milepost"]["command"])
    given = {f"/run/secrets/{name}" for name in compose["services"]["milepost"]["secrets"]}
    assert given == {server.key_file, server.admin_key_file}
    assert set(compose["secrets"]) == set(compose["services"]["milepost"]["secrets"])
    unit = (DEPLOY / "milepost.service").read_text()
    assert "EnvironmentFile=/etc/milepost.env" in unit
    assert set(re.findall(r"MILEPOST_\w+", unit)) == set(secrets)


def test_the_documented_docker_run_is_locked_down_too():
    page = (ROOT / "docs" / "deployment.md").read_text()
    (command,) = re.findall(r"^docker run (?:.*\\\n)*.*", page, re.M)
    words = shlex.split(command)
    assert {"--read-only", "--cap-drop", "--security-opt"} <= set(words)
    assert {"MILEPOST_API_KEY", "MILEPOST_ADMIN_KEY"} <= set(words)
    places = [words[at + 1].split(":")[0] for at, word in enumerate(words) if word == "--tmpfs"]
    assert places == ["/tmp", HOME]
