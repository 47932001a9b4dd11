"""Loads the policy and its tokenizer from a hub name, a folder or a GGUF file, or builds them from scratch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from grpo_pl.files.rows import read_object
from grpo_pl.policy.inputs import auto_class
from grpo_pl.policy.lora import Lora, add_adapters, base_of, merged
from grpo_pl.policy.pretrained import MANIFEST, check_kind, check_pretrained, load_pretrained, one_clear_line
from grpo_pl.policy.quantization import keep_form, keep_out_of_checkpoints, nf4_config
from grpo_pl.policy.template import ANSWER_TAGS, PLACEHOLDER, THINK_TAGS
from grpo_pl.policy.tokenizer import CHARACTERS, FROM_DATA, character_tokenizer
from grpo_pl.types import SamplingParams

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The causal language model that is trained. Give exactly one of ``path`` and ``from_scratch``."""

    path: str | None = None
    """Hub name, local folder in the Hugging Face layout, or GGUF file, which may lie in an installed package:
    ``package:NAME/FILE.gguf``. A folder of adapters is read as its base model with the adapters added to the
    weights."""
    from_scratch: dict[str, Any] | None = None
    """A ``transformers`` config with its ``model_type``; its vocabulary is ``characters`` and ``tags``."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Type of the weights. Keep float32 for training: small updates are lost when bfloat16 weights are rounded."""
    attn_implementation: str | None = None
    """``sdpa``, ``eager``, ``flash_attention_2`` …; null lets transformers choose."""
    init_seed: int = 0
    """Seed of the weights of a from-scratch model."""
    characters: str | None = None
    """Characters of a from-scratch model's tokenizer, one token each; null takes newline and printable ASCII, and
    ``from_data`` adds those that prompts, gold answers and demonstrations hold, collected once for the whole run."""
    tags: list[str] = field(default_factory=lambda: [*THINK_TAGS, *ANSWER_TAGS])
    """Further tokens of a from-scratch model's tokenizer, one for each of these texts."""
    lora: Lora | None = None
    """Train low-rank adapters and freeze the model's own weights; null trains all weights."""
    quantization: Literal["nf4"] | None = None
    """Hold the frozen weights of ``lora`` in 4 bits (QLoRA); needs bitsandbytes. ``dtype`` is that of the products and
    of all other weights. null does not quantize."""
    images: bool = False
    """Load an image-text model (SmolVLM, Idefics3, LLaVA) with its image processor, and read the images of problems;
    false loads a causal language model, and refuses such a one."""
    train_vision: bool = False
    """With ``images``, train the vision tower as well; false trains the language model and what leads to it."""
    max_image_tokens: int = 2048
    """With ``images``, most tokens of one image; more are an error."""

    def __post_init__(self) -> None:
        if isinstance(self.lora, dict):  # as read from YAML or JSON
            object.__setattr__(self, "lora", Lora(**self.lora))
        if (self.path is None) == (self.from_scratch is None):
            raise ValueError(
                "policy: give exactly one of `path` (hub name, folder or GGUF file) and `from_scratch` (a config)."
            )
        if self.from_scratch is not None and "model_type" not in self.from_scratch:
            raise ValueError("policy.from_scratch needs a `model_type`, such as qwen2 or llama.")
        if self.train_vision and (self.lora is not None or not self.images):
            raise ValueError(
                "policy.train_vision trains the vision tower of a policy with images: set policy.images true and "
                "policy.lora null, whose adapters are in the language model alone."
            )
        if self.max_image_tokens < 1:
            raise ValueError(f"policy.max_image_tokens must be at least 1, got {self.max_image_tokens}.")
        if self.quantization is not None and (self.lora is None or self.path is None):
            raise ValueError(
                "policy.quantization holds frozen weights of a trained model: set policy.path and policy.lora, or "
                "policy.quantization null."
            )

    @property
    def source(self) -> str | None:
        """``path`` itself, or the folder that a GGUF file was unpacked into."""
        if self.path is None or not (self.path.startswith("package:") or self.path.endswith(".gguf")):
            return self.path
        from grpo_pl.policy.gguf_files import as_folder

        return as_folder(self.path)

    def check_sharding(self) -> None:
        """Refuses what FSDP2 cannot shard."""
        if self.quantization is not None:
            raise ValueError(
                "policy.quantization cannot be sharded by FSDP2: set it null, or another trainer.strategy."
            )


def load_tokenizer(policy: PolicyConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of ``policy``, with padding on the left; it always has a padding token. One that has no EOS token
    takes the first that the model's generation settings name.

    Raises:
        ValueError: it cannot be loaded, or has neither a padding nor an EOS token.
    """
    source = policy.source
    if source is None:
        assert policy.characters != FROM_DATA, "grpo_pl.training.vocabulary collects them first"
        made = character_tokenizer(policy.tags, CHARACTERS if policy.characters is None else policy.characters)
        if policy.images:
            from grpo_pl.extras.images.models import placeholder_tokens

            made.add_tokens(placeholder_tokens(str((policy.from_scratch or {})["model_type"])), special_tokens=True)
            _give_reader(made, policy, None)
        return made
    saved = any((Path(source) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    files = source if saved else base_of(source)  # adapters may come without a tokenizer
    with one_clear_line(files, "tokenizer" if files == source else f"tokenizer of the base model of {source},"):
        _check_tokens(Path(files) / "tokenizer.json")
        kind = _tokenizer_class(files)
        no_code = {"trust_remote_code": False} if kind.__name__ == "AutoTokenizer" else {}  # the other runs no code
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(files, padding_side="left", **no_code)
    _check_tokenizer(tokenizer, Path(files))
    if tokenizer.eos_token_id is None:
        named = map(tokenizer.convert_ids_to_tokens, declared_eos_ids(source))
        tokenizer.eos_token = next((token for token in named if token is not None), None)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {source!r} has neither a padding nor an EOS token.")
        tokenizer.pad_token = tokenizer.eos_token
    if policy.images:
        _give_reader(tokenizer, policy, base_of(source))
    return tokenizer


def _give_reader(tokenizer: PreTrainedTokenizerBase, policy: PolicyConfig, folder: str | None) -> None:
    from grpo_pl.extras.images.models import give_reader

    give_reader(tokenizer, model_config(policy, tokenizer), folder, most_tokens=policy.max_image_tokens)


def _check_tokens(file: Path) -> None:
    """Refuses a ``tokenizer.json`` that holds none; transformers would fail on it without naming it."""
    if file.is_file():
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_file(str(file))
        except Exception as error:  # the library has no type of its own
            raise ValueError(f"{file} holds no tokenizer: {error}") from error


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Refuses a tokenizer that transformers made up because its files are missing, and a chat template that is none."""
    from jinja2 import TemplateSyntaxError

    vocabulary = set(tokenizer.vocab_files_names.values())
    if folder.is_dir() and vocabulary and not any((folder / name).is_file() for name in vocabulary):
        raise ValueError(f"cannot load the tokenizer: {folder} has no {' or '.join(sorted(vocabulary))}.")
    if tokenizer.chat_template:
        files = [file for name in ("chat_template.jinja", "tokenizer_config.json") if (file := folder / name).is_file()]
        where = next(iter(files), f"the tokenizer of {str(folder)!r}")
        if not isinstance(tokenizer.chat_template, str | dict):
            raise ValueError(f"{where}: the chat template must be a text, got {tokenizer.chat_template!r:.60}.")
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ValueError(f"{where}: the chat template is no Jinja, line {error.lineno}: {error.message}") from error
        except Exception:  # one that wants other messages: it raises whatever its author chose
            pass


def _tokenizer_class(source: str) -> Any:
    """The class that loads the tokenizer of ``source``. ``AutoTokenizer`` would build Qwen2's tokenizer for any
    ``qwen2`` folder, even if the folder declares its ``tokenizer.json`` complete; ours would then lose spaces and
    newlines."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = Path(source).expanduser() / "tokenizer_config.json"
    declared = read_object(file).get("tokenizer_class") if file.is_file() else None
    if declared is None and (file.parent / MANIFEST).is_file():  # as an export always has it
        raise ValueError(f"{file} {'has no tokenizer_class' if file.is_file() else 'is missing'}.")
    return PreTrainedTokenizerFast if declared in ("TokenizersBackend", "PreTrainedTokenizerFast") else AutoTokenizer


def load_model(
    policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase, path: str | None = None, *, weights: bool = True
) -> PreTrainedModel:
    """The model of ``policy``, or the one saved under ``path``, in training mode with dropout set to zero. See
    `load_pretrained`: no weight of a saved one is left at random.

    Args:
        weights: false builds the architecture only, if weights are loaded from a checkpoint later.

    Raises:
        ValueError: no such model, or its config cannot be built, or its files lack a part of its weights.
    """
    kind = auto_class(images=policy.images)
    options: dict[str, Any] = {"attn_implementation": policy.attn_implementation} if policy.attn_implementation else {}
    source = path or policy.source
    if source is None or not weights:
        config = model_config(policy, tokenizer, source)
        check_kind(kind, config)
        of_config = getattr(config, "dtype", None) or torch.float32
        dtype = of_config if policy.dtype == "auto" else getattr(torch, policy.dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(policy.init_seed)
            try:
                model = kind.from_config(config, dtype=dtype, **options)
            except Exception as error:  # as for the config
                raise ValueError(f"no {config.model_type} model can be built from this config: {error!r}") from error
        if source is not None:
            model.generation_config = _generation_settings(source) or model.generation_config  # names the end tokens
    else:
        if policy.quantization is not None:
            options["quantization_config"] = nf4_config(getattr(torch, policy.dtype, torch.float32))
        dtype = "auto" if policy.dtype == "auto" else getattr(torch, policy.dtype)
        if base_of(source) == source:
            model = load_pretrained(kind, source, dtype=dtype, **options)
        else:
            if policy.quantization is not None:
                raise ValueError(f"policy.path {source} holds adapters: merge them before policy.quantization.")
            wide = torch.float32 if dtype == "auto" else dtype  # a base's bfloat16 would round what was learned
            with torch.random.fork_rng(devices=[]):  # peft draws adapters before it reads them
                model = merged(load_pretrained(kind, source, dtype=wide, **options), kind, **options)
            model.generation_config = _generation_settings(source) or model.generation_config
    switch_dropout_off(model)  # rollout and scoring must use one distribution: the first ratio of an update is 1
    if policy.images:
        from grpo_pl.extras.images.models import prepare_model

        prepare_model(model, tokenizer, train_vision=policy.train_vision)
    if policy.lora is not None:
        add_adapters(model, policy.lora, seed=policy.init_seed)
    if policy.quantization is not None and weights:
        keep_form(model)
        keep_out_of_checkpoints(model)
    return model.train()  # from_pretrained leaves it in eval mode


def switch_dropout_off(model: torch.nn.Module) -> None:
    """Sets every dropout of a model to zero, in modules and in functions that take their rate from a module, so that
    training and evaluation mode compute the same; see also `grpo_pl.policy.dropout`."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def check_weights(policy: PolicyConfig) -> None:
    """Refuses what `load_model` would refuse of the files of a saved model, long before it is loaded."""
    source = policy.source
    if source is not None:
        check_pretrained(auto_class(images=policy.images), source)


def _generation_settings(source: str) -> GenerationConfig | None:
    """Those of a saved model, or of the base of adapters that have none; None if there are none, as a model may lack
    them."""
    from transformers import GenerationConfig

    for folder in dict.fromkeys([source, base_of(source)]):
        with one_clear_line(folder, "generation settings"), suppress(OSError):
            return GenerationConfig.from_pretrained(folder)
    return None


def declared_eos_ids(source: str) -> list[int]:
    """The ids of the end tokens that the files of a saved model name: its generation settings, or else its config. For
    adapters without these files they are those of the base model."""
    from transformers import AutoConfig

    settings = _generation_settings(source)
    if settings is not None:
        ids = settings.eos_token_id
    else:
        ids, base = None, base_of(source)
        with one_clear_line(base, "model"), suppress(OSError, ValueError):  # a tokenizer without a model
            ids = AutoConfig.from_pretrained(base, trust_remote_code=False).get_text_config().eos_token_id
    return [i for i in (ids if isinstance(ids, list) else [ids]) if i is not None]


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of all tokens that end a completion: the tokenizer's EOS and those of the model's generation config."""
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = declared if isinstance(declared, list) else [declared]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams) -> list[int]:
    """The ids of all tokens that end a completion: those of `eos_ids`, and those that ``sampling`` names."""
    return sorted({*eos_ids(model, tokenizer), *sampling.stop_token_ids})


def context_length(config: PreTrainedConfig) -> int | None:
    """Most tokens of prompt and completion together that a model can attend to; None if its config does not say."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(length) if length else None


def model_config(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase, path: str | None = None) -> PreTrainedConfig:
    """The ``transformers`` config of ``policy``, or of the model saved under ``path``; loads no weights."""
    from transformers import AutoConfig

    source = path or policy.source
    if source is None:
        return _scratch_config(policy, tokenizer)
    base = base_of(source)
    with one_clear_line(base, "model" if base == source else f"base model of {source},"):
        return AutoConfig.from_pretrained(base, trust_remote_code=False)


def _scratch_config(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    from transformers import AutoConfig

    settings = dict(policy.from_scratch or {})
    model_type = settings.pop("model_type")
    tokens = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    try:
        defaults = AutoConfig.for_model(model_type)
        text = defaults.get_text_config()
        part = next((name for name in defaults.sub_configs if getattr(defaults, name, None) is text), None)
        if part is None:
            config = AutoConfig.for_model(model_type, **{**tokens, **settings})
        else:  # of several models, of which one reads and writes text
            inner = {part: {**tokens, **(settings.get(part) or {})}}
            config = AutoConfig.for_model(model_type, **{**settings, **inner})
    except Exception as error:  # the user's values may cause any error, such as a division by 0
        reason = " ".join(str(error).split()).split(". ")[0]  # the rest of the message lists all model types
        raise ValueError(f"policy.from_scratch: transformers refuses {model_type!r}: {reason}") from error
    for name in settings:  # transformers stores unknown settings and ignores them
        if not hasattr(defaults, name) and name != "rope_theta":  # which becomes part of rope_parameters
            near = get_close_matches(name, defaults.to_dict(), n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise ValueError(f"policy.from_scratch: {model_type} has no setting {name!r}{hint}")
    _check_heads(config.get_text_config())
    if policy.images:
        config.image_token_id = tokenizer.convert_tokens_to_ids(PLACEHOLDER)
    return config


def _check_heads(config: Any) -> None:
    """Refuses heads for which a forward pass fails later: rotary positions turn pairs of numbers."""
    width, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if not width or not heads:
        return
    shared, size = getattr(config, "num_key_value_heads", None) or heads, getattr(config, "head_dim", None)
    pairs = 2 if hasattr(config, "rope_parameters") else 1
    if (size or width / heads) % pairs or heads % shared:
        raise ValueError(
            f"policy.from_scratch: hidden_size {width} with {heads} heads of {size or width / heads:g}, which share "
            f"{shared} of keys and values: a head must have {'an even' if pairs == 2 else 'a whole'} number of "
            "dimensions, and num_key_value_heads divide num_attention_heads."
        )


def choose_device(wanted: str) -> str:
    """The name of a device for torch; ``auto`` is ``cuda`` if there is a GPU, else ``cpu``.

    Raises:
        ValueError: no such device, or a GPU on a machine without one.
    """
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(wanted).type
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda, cuda:1 …, got {wanted!r}.") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {wanted!r}: this machine has no usable GPU.")
    return wanted
