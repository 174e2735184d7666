"""Sinks that hand scalars to another package: TensorBoard, Weights & Biases, Comet."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from fullspeed.base.errors import ConfigError, ConfigFault
from fullspeed.config.monitor import Comet, WandB
from fullspeed.monitor.sinks import Sink

INSTALL = "install it with `pip install 'fullspeed[monitor]'`"


def require_package(section: str, module: str) -> None:
    """Raise ConfigError unless the module that the configuration's `section` needs is installed."""
    if importlib.util.find_spec(module) is None:
        rule = f"needs the package {module.replace('_', '-')}, which is not installed"
        raise ConfigError([ConfigFault(f"{section}.enabled", True, rule, f"{INSTALL}, or set enabled: false")])


class TensorBoardSink(Sink):
    """Event files for TensorBoard in `folder`."""

    def __init__(self, folder: Path) -> None:
        tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(str(folder))

    @override
    def write_scalars(self, samples: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    @override
    def close(self) -> None:
        self._writer.close()


class WandBSink(Sink):
    """A Weights & Biases run; offline where W&B's own environment says so."""

    def __init__(self, section: WandB) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(project=section.project, group=section.group, entity=section.team)

    @override
    def write_scalars(self, samples: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=samples)

    @override
    def close(self) -> None:
        self._run.finish()


class CometSink(Sink):
    """A Comet experiment. A name is written again only after `samples_log_interval` more samples."""

    def __init__(self, section: Comet) -> None:
        comet: Any = importlib.import_module("comet_ml")
        named = {} if section.experiment_name is None else {"name": section.experiment_name}
        self._experiment = comet.start(
            api_key=section.api_key,
            project=section.project,
            workspace=section.workspace,
            experiment_key=section.experiment_key,
            mode=section.mode,
            online=section.online,
            experiment_config=comet.ExperimentConfig(**named),
        )
        self._interval = section.samples_log_interval
        self._written_at: dict[str, int] = {}

    @override
    def write_scalars(self, samples: int, values: Mapping[str, float]) -> None:
        due = {name: value for name, value in values.items() if self._is_due(name, samples)}
        self._written_at.update(dict.fromkeys(due, samples))
        for name, value in due.items():
            self._experiment.log_metric(name, value, step=samples)

    def _is_due(self, name: str, samples: int) -> bool:
        last = self._written_at.get(name)
        return last is None or samples - last >= self._interval

    @override
    def close(self) -> None:
        self._experiment.end()
