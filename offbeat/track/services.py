"""MLflow and Weights & Biases, through the user's own installation of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.errors import ConfigError
from offbeat.track.callback import Begin, End
from offbeat.track.tracker import Tracker, final, flat, installed

LONGEST = 500  # letters of a parameter that MLflow always takes


class MLflow(Tracker):
    """A run in MLflow: parameters, metrics over samples, and the summary as `final/...` at its end.

    `uri` is the tracking store, else MLflow's own setting. `params` are added to what is known of
    the run. It uses a client of its own: MLflow's active run is left alone.
    """

    interval = 1.0  # a store of files takes milliseconds for each metric

    def __init__(
        self,
        experiment: str = "offbeat",
        *,
        uri: str | Path | None = None,
        name: str | None = None,
        params: Mapping[str, Any] | None = None,
        every: int | None = None,
    ):
        self.experiment, self.name, self.every = experiment, name, every
        self.uri = uri.resolve().as_uri() if isinstance(uri, Path) else uri
        self.params = dict(params or {})
        self.mlflow = installed("mlflow", "offbeat[mlflow]")
        self.client: Any = None
        self.run_id: str | None = None

    def open(self, begin: Begin) -> None:
        entities = installed("mlflow.entities", "offbeat[mlflow]")
        try:
            self.client = self.mlflow.MlflowClient(tracking_uri=self.uri)
            found = self.client.get_experiment_by_name(self.experiment)
            if found is None:
                number = self.client.create_experiment(self.experiment)
            else:
                number = found.experiment_id
            self.run_id = self.client.create_run(number, run_name=self.name).info.run_id
            known = flat(begin.settings) | {"workers": str(begin.workers)} | flat(self.params)
            params = [entities.Param(key, value[:LONGEST]) for key, value in known.items()]
            self.client.log_batch(self.run_id, params=params)
        except self.mlflow.exceptions.MlflowException as error:
            raise ConfigError(f"MLflow refuses to begin a run: {error}") from error

    def put(self, values: dict[str, float], when: float, samples: int) -> None:
        metric = self.mlflow.entities.Metric
        stamp = int(when * 1000)
        metrics = [metric(key, value, stamp, samples) for key, value in values.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def close(self, end: End) -> None:
        values = {f"final/{key}": value for key, value in final(end.summary).items()}
        self.put(values, (self.began or 0.0) + end.summary.seconds, self._samples)
        self.client.set_terminated(self.run_id, "FINISHED" if end.finished else "KILLED")


class WandB(Tracker):
    """A run in Weights & Biases: config, metrics over samples, and the summary at its end.

    `options` go to `wandb.init` as they are: entity, mode="offline", dir, tags.
    """

    interval = 1.0

    def __init__(
        self,
        project: str = "offbeat",
        *,
        name: str | None = None,
        params: Mapping[str, Any] | None = None,
        every: int | None = None,
        **options: Any,
    ):
        self.project, self.name, self.every = project, name, every
        self.params, self.options = dict(params or {}), options
        self.wandb = installed("wandb", "wandb")
        self.run: Any = None

    def open(self, begin: Begin) -> None:
        config = {**begin.settings, "workers": begin.workers, **self.params}
        self.run = self.wandb.init(
            project=self.project, name=self.name, config=config, **self.options
        )
        # A test's result comes later than the updates that were made meanwhile, and W&B's own
        # steps cannot go back: so samples are a metric, and the axis of all others.
        self.run.define_metric("samples")
        self.run.define_metric("*", step_metric="samples")

    def put(self, values: dict[str, float], when: float, samples: int) -> None:
        self.run.log({**values, "samples": samples, "time": when - (self.began or 0.0)})

    def close(self, end: End) -> None:
        values = final(end.summary)
        self.run.summary.update({f"final/{key}": value for key, value in values.items()})
        self.run.finish(exit_code=0 if end.finished else 1)
