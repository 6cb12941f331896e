"""Starting a fleet: what it waits for, and what it says of a port taken meanwhile."""

import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy import local, serving
from deploy.config import load
from deploy.local import FleetFailed, LocalFleet, LocalRay, check_trainer
from deploy.preflight import check_gpus
from rollout.errors import ConfigError
from services.environment import check_environment
from services.proxy_limits import CALLBACK, CALLBACK_VARIABLE, VARIABLE, proxy_limits
from tests.ports import free_port


def test_the_state_of_a_starting_fleet_is_asked_for_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = LocalFleet(load([], ["--model.path", str(tmp_path)]))
    states = iter(["DEPLOYING", "DEPLOYING", "RUNNING"])
    waits: list[float] = []

    def status() -> SimpleNamespace:
        application = SimpleNamespace(status=SimpleNamespace(value=next(states)))
        return SimpleNamespace(applications={fleet.config.fleet: application})

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=SimpleNamespace(status=status)))
    monkeypatch.setattr(time, "sleep", waits.append)
    fleet._wait_until_running()
    assert waits == [1.0, 1.0]


def test_a_start_that_takes_too_long_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--model.path", str(tmp_path), "--state_dir", str(tmp_path / "state"), "--start_timeout_s", "0.05"]
    status = SimpleNamespace(applications={})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=SimpleNamespace(status=lambda: status)))
    with pytest.raises(FleetFailed, match=r"was not healthy after start_timeout_s=0\.05"):
        LocalFleet(load([], flags))._wait_until_running()


@pytest.mark.parametrize(
    ("why", "error"),
    [("rollout.errors.ConfigError: slo.ttft_s=0.1 is too little", ConfigError), ("RuntimeError: no", FleetFailed)],
)
def test_what_a_replica_finds_wrong_with_its_configuration_is_told_as_that(
    why: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = LocalFleet(load([], ["--model.path", str(tmp_path), "--state_dir", str(tmp_path / "state")]))
    application = SimpleNamespace(
        status=SimpleNamespace(value="DEPLOY_FAILED"), message="", deployments={"policy": SimpleNamespace(message=why)}
    )
    status = SimpleNamespace(applications={fleet.config.fleet: application})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=SimpleNamespace(status=lambda: status)))
    with pytest.raises(error, match=f"failed to start: {why.removeprefix('rollout.errors.ConfigError: ')}"):
        fleet._wait_until_running()


def test_a_fleet_on_gpus_that_ray_does_not_find_is_refused(tmp_path: Path) -> None:
    replicas = [f"--fleet.autoscaling.{most}_replicas=2" for most in ("min", "max")]
    flags = ["--model.path", str(tmp_path), "--fleet.engine.device=gpu", "--fleet.engine.tensor_parallel_size=2"]
    fleet = LocalFleet(load([], [*flags, *replicas])).config
    with pytest.raises(ConfigError, match=r"engine\.device=gpu: 4 are needed .*min_replicas=2 x .*size=2.*finds 3 "):
        check_gpus(fleet, 3)
    check_gpus(fleet, 4)
    check_gpus(LocalFleet(load([], ["--model.path", str(tmp_path)])).config, 0)


def test_a_fleet_that_is_interrupted_before_it_serves_did_not_end_well(
    toml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalFleet, "__enter__", stop)
    with pytest.raises(KeyboardInterrupt):
        serving.serve(load([toml], []))
    assert "stopped before it served" in capsys.readouterr().out
    monkeypatch.setattr(LocalFleet, "__enter__", lambda fleet: fleet)
    monkeypatch.setattr(LocalFleet, "__exit__", lambda *_: None)
    monkeypatch.setattr(serving, "write_resolved", stop)
    assert serving.serve(load([toml], [])) == 0


def test_a_port_taken_while_ray_starts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**_: object) -> None:
        raise RuntimeError("Failed to bind to address")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=SimpleNamespace(start=start)))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"fleet\.gateway\.port={port} on 127\.0\.0\.1 cannot be used"):
            LocalFleet(load([], ["--model.path", str(tmp_path), "--fleet.gateway.port", str(port)]))._start_proxy()


def test_another_failure_of_serve_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**_: object) -> None:
        raise RuntimeError("no proxy")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=SimpleNamespace(start=start)))
    fleet = LocalFleet(load([], ["--model.path", str(tmp_path), "--fleet.gateway.port", str(free_port())]))
    with pytest.raises(RuntimeError, match="no proxy"):
        fleet._start_proxy()


@pytest.mark.parametrize("name", ["VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_SERVER_DEV_MODE"])
def test_no_fleet_starts_in_an_environment_that_opens_its_engines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = LocalFleet(load([], ["--model.path", str(tmp_path), "--state_dir", str(tmp_path / "state")]))
    for value in ("1", "true", "2", " "):
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=rf"^{name}={value} .*Unset it"):
            fleet.prepare()
    assert not (tmp_path / "state").exists()
    for value in ("", "0"):
        check_environment({name: value})
    check_environment({})


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("10.0.0.3", "http://10.0.0.3:8000"),
        ("gpu-node", "http://gpu-node:8000"),
    ],
)
def test_a_fleet_names_the_address_at_which_it_is_reached_from_here(host: str, url: str, tmp_path: Path) -> None:
    flags = ["--model.path", str(tmp_path), "--fleet.gateway.host", host]
    assert LocalFleet(load([], flags)).url == url


def test_ray_is_started_with_the_bounds_of_serves_proxy(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CALLBACK_VARIABLE, VARIABLE, "PYTHONPATH"):
        monkeypatch.setenv(name, "")  # so that all are as before afterwards
    seen: dict[str, str] = {}

    def start(*_: object, **__: object) -> LocalRay:
        seen.update(os.environ)
        raise RuntimeError("no Ray")

    monkeypatch.setattr(local, "start_ray", start)
    monkeypatch.setattr(local, "check_fleet", lambda _: None)
    flags = ["--fleet.gateway.limits.max_body_bytes", "5000", "--fleet.gateway.port", str(free_port())]
    fleet = LocalFleet(load([toml], flags))
    try:
        fleet.prepare()
        with pytest.raises(RuntimeError, match="no Ray"):
            fleet._start_ray()
    finally:
        fleet.stop()
    assert seen[CALLBACK_VARIABLE] == CALLBACK
    assert proxy_limits(seen).max_body_bytes == 5000
    assert str(Path(local.__file__).parents[1]) in seen["PYTHONPATH"].split(os.pathsep)


def test_bounds_of_the_proxy_that_cannot_be_meant_stop_the_start(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"max_url": 5}')
    monkeypatch.setattr(local, "check_fleet", lambda _: None)
    fleet = LocalFleet(load([toml], ["--fleet.gateway.port", str(free_port())]))
    with pytest.raises(ConfigError, match=rf"{VARIABLE}: max_url"):
        fleet.prepare()
    fleet.stop()


ADAPTER_FLEET = ["--fleet.sharing.mode", "adapter", "--fleet.sharing.max_lora_rank", "16"]
ADAPTER_RUN = ["--train.lora.publish", "adapter"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (ADAPTER_FLEET, ["train.lora is not set", "sharing.mode=adapter"]),
        ([*ADAPTER_FLEET, *ADAPTER_RUN, "--train.lora.r", "32"], ["train.lora.r=32", "sharing.max_lora_rank=16"]),
        ([*ADAPTER_RUN, "--fleet.slo.ttft_s", "2"], ["train.lora.publish=adapter", "sharing.mode=live"]),
    ],
)
def test_neither_fleet_nor_trainer_starts_where_their_one_file_does_not_fit(
    toml: Path, tmp_path: Path, flags: list[str], words: list[str]
) -> None:
    config = load([toml], flags)
    with pytest.raises(ConfigError) as fleet_refusal:
        LocalFleet(config).prepare()
    with pytest.raises(ConfigError) as trainer_refusal:
        check_trainer(config)
    assert str(fleet_refusal.value) == str(trainer_refusal.value)
    for word in words:
        assert word in str(fleet_refusal.value)
    assert not (tmp_path / "state").exists()


def test_a_file_that_says_nothing_of_the_fleet_is_no_reason_to_refuse_its_run(toml: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.prompts\.train=.*: no such file"):
        check_trainer(load([toml], ADAPTER_RUN))
