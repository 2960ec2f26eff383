"""The settings of sampling by vLLM, under the names of TRL's GRPOConfig; `rollouts/load.py` makes the backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onetrunk.utils.options import IMPORTANCE_MODES, option

MODES_OF_VLLM = ("server", "colocate")
TIMEOUTS = ("vllm_server_timeout", "vllm_request_timeout")
SERVER_SETTINGS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", *TIMEOUTS, "vllm_api_key_env")
ENGINE_SETTINGS = ("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_enable_sleep_mode")


@dataclass(repr=False)
class VLLMServerConfig:
    """Which vLLM servers sample. Every command that samples has these settings.

    List it before the other bases, whose __post_init__ it calls.
    """

    use_vllm: bool = option(
        False,
        "Sample by vLLM, which receives the adapter, instead of by the model in this process.",
    )
    vllm_server_base_url: list[str] | None = field(
        default=None,
        metadata={
            "help": "Address of the vLLM server, such as http://localhost:8000; several: rows are spread over them."
            " None: vllm_server_host and vllm_server_port."
        },
    )
    vllm_server_host: str = option("127.0.0.1", "Host of the vLLM server, without vllm_server_base_url.")
    vllm_server_port: int = option(8000, "Port of the vLLM server, without vllm_server_base_url; 1 to 65535.")
    vllm_server_timeout: float = option(600.0, "Seconds to wait at startup until every vLLM server is up; above 0.")
    vllm_request_timeout: float = option(
        900.0,
        "Seconds that a vLLM server may take for one completion, with repetitions and the waits that it asks for"
        " (Retry-After); above 0. After that the run ends.",
    )
    vllm_api_key_env: str | None = option(
        None, "Environment variable that holds the vLLM servers' key (onetrunk serve --api_key_env); None: no key."
    )

    def __post_init__(self) -> None:
        urls = self.vllm_server_base_url
        self.vllm_server_base_url = [urls] if isinstance(urls, str) else urls
        self._check_server()
        super().__post_init__()

    @property
    def server_urls(self) -> list[str]:
        """Addresses of the vLLM servers, without a slash at the end."""
        urls = self.vllm_server_base_url or [f"http://{self.vllm_server_host}:{self.vllm_server_port}"]
        return [url.rstrip("/") for url in urls]

    def _check_server(self) -> None:
        for url in self.vllm_server_base_url or []:
            if not url.startswith(("http://", "https://")):
                raise ValueError(
                    f"vllm_server_base_url {url!r} is not an address; write it with its scheme, such as"
                    " http://localhost:8000"
                )
        if len(set(self.server_urls)) != len(self.server_urls):
            raise ValueError("vllm_server_base_url names a server twice; name each once")
        port = self.vllm_server_port
        if not isinstance(port, int) or not 1 <= port <= 65535:
            raise ValueError(f"vllm_server_port is {port!r}; it must be a whole number from 1 to 65535")
        for name in TIMEOUTS:
            value = getattr(self, name)
            if isinstance(value, str) or not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value!r}; it must be a number of seconds above 0")
        changed = _changed(self, SERVER_SETTINGS)
        if changed and not self.use_vllm:
            raise ValueError(f"{changed[0]} is set and use_vllm is not; set use_vllm: true, or leave it out")


@dataclass(repr=False)
class VLLMConfig(VLLMServerConfig):
    """Where the rollouts of a training are sampled, and how samples of another distribution are weighted.

    List it before TrainingArguments among the bases.
    """

    vllm_mode: str = option(
        "server",
        "'server': the servers run as processes of their own (onetrunk serve). 'colocate': the engine runs in the"
        " training process and shares its GPU (not yet run on a GPU).",
    )
    vllm_gpu_memory_utilization: float = option(
        0.3, "colocate: share of the GPU's memory that the engine takes, above 0, below 1."
    )
    vllm_max_model_length: int | None = option(
        None, "colocate: most tokens of a prompt with its completion, 2 or more; None: as many as the run needs."
    )
    vllm_enable_sleep_mode: bool = option(
        False,
        "colocate: between two rollouts the engine's weights are in the machine's memory and its cache is freed, so"
        " the update has the whole GPU; waking takes time. Needs a GPU.",
    )
    vllm_importance_sampling_correction: bool | None = option(
        None,
        "Multiply the policy loss of a token, and its KL in the loss and in kl/ref, by the ratio of the policy's"
        " probability at the start of the update to the sampler's. None: on with vLLM, a schedule that samples ahead,"
        " top_p or top_k; else off.",
    )
    vllm_importance_sampling_mode: str = option(
        "token_truncate",
        "What happens to a ratio outside the bounds: 'token_truncate' moves it to the bound, 'token_mask' leaves the"
        " token out.",
    )
    vllm_importance_sampling_clip_max: float | None = option(3.0, "Upper bound of the ratio, above 0; None: no bound.")
    vllm_importance_sampling_clip_min: float | None = option(
        None, "Lower bound of the ratio, 0 or more and below the upper bound; None: no bound."
    )

    def __post_init__(self) -> None:
        self._check_mode()
        self._check_importance()
        super().__post_init__()

    @property
    def is_colocated(self) -> bool:
        """Whether the engine runs in the training process."""
        return self.use_vllm and self.vllm_mode == "colocate"

    def _check_mode(self) -> None:
        if self.vllm_mode not in MODES_OF_VLLM:
            raise ValueError(f"vllm_mode is {self.vllm_mode!r}; it must be one of {', '.join(MODES_OF_VLLM)}")
        if self.vllm_mode != "server" and not self.use_vllm:
            raise ValueError("vllm_mode is set and use_vllm is not; set use_vllm: true, or leave it out")
        share, length = self.vllm_gpu_memory_utilization, self.vllm_max_model_length
        if isinstance(share, str) or not 0 < share < 1:
            raise ValueError(
                f"vllm_gpu_memory_utilization is {share!r}; it must be above 0 and below 1, because the trainer needs"
                " the rest"
            )
        if length is not None and (not isinstance(length, int) or length < 2):
            raise ValueError(f"vllm_max_model_length is {length!r}; it must be a whole number of tokens, 2 or more")
        if self.is_colocated:
            changed = _changed(self, SERVER_SETTINGS)
            if changed:
                raise ValueError(f"{changed[0]} is set, and vllm_mode 'colocate' has no server; leave it out")
            return
        changed = _changed(self, ENGINE_SETTINGS)
        if changed:
            raise ValueError(
                f"{changed[0]} belongs to vllm_mode 'colocate'; set use_vllm: true and vllm_mode: colocate, or give it"
                " to the server (onetrunk serve)"
            )

    def _check_importance(self) -> None:
        mode, prefix = self.vllm_importance_sampling_mode, "vllm_importance_sampling"
        if mode in ("sequence_truncate", "sequence_mask"):
            raise ValueError(
                f"{prefix}_mode {mode!r} is not supported: it multiplies the ratios of all tokens, so rounding alone"
                " puts long completions outside the bounds; set token_truncate or token_mask"
            )
        if mode not in IMPORTANCE_MODES:
            raise ValueError(f"{prefix}_mode is {mode!r}; it must be one of {', '.join(IMPORTANCE_MODES)}")
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        for name, bound in (("min", low), ("max", high)):
            is_number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
            if bound is not None and not (is_number and 0 <= bound < float("inf")):
                raise ValueError(f"{prefix}_clip_{name} is {bound!r}; it must be a number, 0 or more, or null")
        if high is not None and not high > (low or 0):
            raise ValueError(
                f"{prefix}_clip_max is {high} and {prefix}_clip_min is {low}; the upper bound must be above 0 and"
                " above the lower one"
            )
        if self.vllm_importance_sampling_correction is not False and low is None and high is None:
            raise ValueError(
                f"{prefix}_clip_min and {prefix}_clip_max are both null: a single rare token could then outweigh a"
                f" rollout; set {prefix}_clip_max, such as 3.0, or {prefix}_correction to false"
            )


def _changed(config: Any, names: Sequence[str]) -> list[str]:
    """Return those of the settings `names` that are not at their defaults."""
    return [name for name in names if getattr(config, name) != VLLMConfig.__dataclass_fields__[name].default]
