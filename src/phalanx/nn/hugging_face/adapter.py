"""A Hugging Face model as any other module: called with inputs and positions, it returns logits, or
hidden states and the head that makes logits of them and nothing else.

Its class is derived from the model's own, so that parameters keep the names that transformers gives
them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from phalanx.core.errors import LayoutError, PhalanxError, format_nearest_word_hint
from phalanx.core.registry import import_object_of_kind, import_optional_dependency
from phalanx.job.hugging_face import (
    HUGGING_FACE_PREFIX,
    find_config_file,
    find_weights_directory,
    is_hugging_face,
    read_model_config,
)
from phalanx.mesh.recorded_init import (
    NotRecordableError,
    build_module_and_record,
    set_initial_values_of_module,
)
from phalanx.nn.hugging_face.plain_head import (
    HeadInputRecorder,
    build_head_output,
    find_plain_head,
    replacing_submodule,
)
from phalanx.nn.hugging_face.refusals import (
    build_refused_config_error,
    build_separate_weights_error,
    build_unbuildable_model_error,
    require_sizes_are_said,
)
from phalanx.nn.hugging_face.shard_rules import build_hugging_face_shard_rules
from phalanx.nn.hugging_face.trial import require_causal_and_trainable_by_trial
from phalanx.nn.objective import HeadOutput

MODELS_PACKAGE = "phalanx.nn.models"
LAYERDROP_SETTINGS = ("layerdrop", "decoder_layerdrop", "encoder_layerdrop")
# transformers' name of an implementation that is written out.
EAGER_IMPLEMENTATION = "eager"
# Attribute of a module: numbers for its `MeasuredModule`.
SHAPE_FACTS_ATTRIBUTE = "shape_facts"


_SMALL_SETTINGS = {"num_hidden_layers": 2, "n_layer": 2, "layer_types": 2, "vocab_size": 512}
# Widths inside of blocks, where most weights of large models are.
_NARROW_SETTINGS = {"intermediate_size": 256, "moe_intermediate_size": 64}
_TOKEN_ID_SETTINGS = ("pad_token_id", "bos_token_id", "eos_token_id")


def resolve_model_factory(kind: str) -> Callable[..., Any]:
    """The function that builds `kind`, "package.module:factory" or "hf:PATH", from model.args."""
    if is_hugging_face(kind):
        return functools.partial(build, kind)
    factory: Callable[..., Any] = import_object_of_kind(kind, MODELS_PACKAGE, "build")
    return factory


def build(kind: str, **args: Any) -> nn.Module:
    """The model of a directory with its weights, or with random ones where there are none.

    On the meta device: without.

    `args` are settings on top of those of config.json. Raises LayoutError for what cannot be built
    or trained.
    """
    values = read_model_config(kind, args)
    config = _build_transformers_config(kind, values, args)
    auto = _choose_auto_class(kind, values, config)
    require_sizes_are_said(find_config_file(kind), config, {**values, **args})
    directory = find_weights_directory(kind)
    try:
        # The default device is meta where a planner asks for shapes alone, and tensors are fake
        # where building is recorded: `recording_phase` takes the weights from their files.
        if directory is None or torch.empty(0).is_meta or isinstance(torch.empty(0), FakeTensor):
            module = auto.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=_choose_attention_implementation(auto, config),
            )
        else:
            attention = _choose_attention_implementation(auto, config)
            module = _load_module_with_weights(
                kind, auto, config, directory, torch.float32, attention
            )
            # `from_pretrained` returns a model in evaluation mode.
            module.train()
    except PhalanxError:
        raise
    except Exception as error:
        raise build_unbuildable_model_error(
            find_config_file(kind), config, {**values, **args}, error
        ) from None
    adapted = _adapt_module_to_phalanx(module, config)
    # On meta, and while its building is recorded, it has no numbers to be tried with.
    if _has_allocated_parameters(adapted):
        reads_images = module.main_input_name == "pixel_values"
        require_causal_and_trainable_by_trial(
            kind, adapted, getattr(adapted, SHAPE_FACTS_ATTRIBUTE), reads_images=reads_images
        )
    return adapted


def _has_allocated_parameters(module: nn.Module) -> bool:
    return all(
        type(parameter) is nn.Parameter and not parameter.is_meta
        for parameter in module.parameters()
    )


def require_trainable_small_model(kind: str, args: Mapping[str, Any]) -> None:
    """Raise the LayoutError of `build` for a model that cannot be trained, as far as one with
    random weights, few blocks and few tokens tells; nothing where there is no such model."""
    try:
        # Drawing the weights of two blocks at their full width takes longer than all else.
        is_tried = _try_small_model(kind, args, _SMALL_SETTINGS | _NARROW_SETTINGS)
    except LayoutError:
        is_tried = False
    if not is_tried:
        # It may be the width that does not go with other settings.
        _try_small_model(kind, args, _SMALL_SETTINGS)


def _try_small_model(kind: str, args: Mapping[str, Any], limits: Mapping[str, int]) -> bool:
    """Try the model of `kind` with settings of at most `limits`; False if it cannot be built with
    these. Raises LayoutError if it cannot be trained."""
    values = read_model_config(kind, args)
    small: dict[str, Any] = dict(args)
    for key, most in limits.items():
        value = small.get(key, values.get(key))
        if isinstance(value, int) and value > most:
            small[key] = most
        # Of each block, in order.
        elif isinstance(value, list):
            small[key] = value[:most]
    for key in _TOKEN_ID_SETTINGS:
        if key in values:
            small[key] = None if key == "pad_token_id" else 0
    try:
        config = _build_transformers_config(kind, values, small)
        auto = _choose_auto_class(kind, values, config)
        attention = _choose_attention_implementation(auto, config)
        with torch.random.fork_rng(devices=[]):
            module = auto.from_config(config, dtype=torch.float32, attn_implementation=attention)
        adapted = _adapt_module_to_phalanx(module, config)
    # Settings that do not go with each other: what is asked for was built already.
    except Exception:
        return False
    reads_images = module.main_input_name == "pixel_values"
    require_causal_and_trainable_by_trial(
        kind, adapted, getattr(adapted, SHAPE_FACTS_ATTRIBUTE), reads_images=reads_images
    )
    return True


def build_module_without_memory(kind: str, build: Callable[[], nn.Module]) -> nn.Module:
    """The module of `build` without memory for its parameters, which get their values from where
    `build` would have got them.

    Raises NotRecordableError, or another error, where that is not possible.
    """
    module = build_module_and_record(build)
    directory = find_weights_directory(kind)
    if directory is not None:
        # Here, for safetensors comes with transformers.
        from phalanx.nn.hugging_face.stored_weights import find_stored_weights

        stored = find_stored_weights(module, directory)
        if stored is None:
            raise NotRecordableError("transformers translates the weights of its files")
        set_initial_values_of_module(module, stored)
    return module


def load_transformers_module(directory: Path, dtype: torch.dtype) -> nn.Module:
    """transformers' own module of a directory with weights, in evaluation mode, with attention and
    experts that are written out.

    Raises LayoutError for what cannot be built, or has other weights than its config says.
    """
    kind = f"{HUGGING_FACE_PREFIX}{directory}"
    values = read_model_config(kind)
    config = _build_transformers_config(kind, values, {})
    auto = _choose_auto_class(kind, values, config)
    return _load_module_with_weights(
        kind,
        auto,
        config,
        directory,
        dtype,
        EAGER_IMPLEMENTATION,
        experts_implementation=EAGER_IMPLEMENTATION,
    )


def _build_transformers_config(kind: str, values: dict[str, Any], args: dict[str, Any]) -> Any:
    quiet = import_optional_dependency(
        "transformers", extra="hf", needed_for=f"model.kind = {kind!r}"
    ).utils.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING_NAMES:
        fix = (
            format_nearest_word_hint(model_type, sorted(CONFIG_MAPPING_NAMES))
            or "code that a directory brings is never run"
        )
        raise LayoutError(
            f"transformers knows no model_type {model_type!r}",
            where=str(find_config_file(kind)),
            fix=fix,
        )
    try:
        parsed = CONFIG_MAPPING[model_type].from_dict(dict(values))
        known = {*parsed.to_dict(), *getattr(parsed, "attribute_map", {})}
        for key in args:
            if key not in known:
                raise LayoutError(
                    f"model.args: {key!r} is no setting of {model_type}",
                    fix=format_nearest_word_hint(key, sorted(known)) or None,
                )
        if not args:
            return parsed
        # Anew, for a config derives some settings from others as it is made.
        return CONFIG_MAPPING[model_type].from_dict({**values, **args})
    except LayoutError:
        raise
    except Exception as error:
        raise build_refused_config_error(
            find_config_file(kind), CONFIG_MAPPING[model_type], {**values, **args}, error
        ) from None


def _choose_auto_class(kind: str, values: dict[str, Any], config: Any) -> Any:
    """The class of transformers' that builds it, for tokens or for images."""
    import transformers
    from transformers.models.auto import modeling_auto as known

    model_type = values["model_type"]
    is_causal = model_type in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    is_image = model_type in known.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    # BERT and its kin are listed as causal, and are so as decoders only.
    is_masked = model_type in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if is_masked and not getattr(config, "is_decoder", False):
        is_trainable = is_image and not is_causal
    else:
        is_trainable = is_image or is_causal
    if not is_trainable or getattr(config, "is_encoder_decoder", False):
        raise LayoutError(
            f"{kind} is a {model_type}, which is no causal language model and no image classifier",
            fix="write a factory of your own and an objective: docs/own-code.md",
        )
    _refuse_untrainable_settings(kind, values, config)
    auto = transformers.AutoModelForImageClassification
    if is_causal:
        auto = transformers.AutoModelForCausalLM
    classes = _list_transformers_model_classes(auto, config)
    # As DeiT's: transformers asks the config which one, and fails.
    if len(classes) > 1 and not config.architectures:
        config.architectures = [classes[0].__name__]
    return auto


def _refuse_untrainable_settings(kind: str, values: dict[str, Any], config: Any) -> None:
    """Raise LayoutError for a config of a model that is not, or cannot be, trained as it says."""
    architectures = list(map(str, values.get("architectures") or ()))
    trainable_suffixes = ("ForCausalLM", "LMHeadModel", "ForImageClassification")
    if architectures and not architectures[0].endswith(trainable_suffixes):
        raise LayoutError(
            f"{kind} is a {architectures[0]}, and causal language models and image classifiers"
            " are trained",
            fix="take architectures out of config.json to train it as one, if it can be",
        )
    if "quantization_config" in values:
        raise LayoutError(f"{kind} is quantized, and quantized weights are not trained")
    if getattr(config, "output_router_logits", False):
        raise LayoutError(
            f"{kind} asks for an auxiliary loss of its router (output_router_logits), which is not"
            " computed",
            fix="set model.args = { output_router_logits = false }",
        )
    for key in LAYERDROP_SETTINGS:
        if getattr(config, key, None):
            raise LayoutError(
                f"{kind} leaves out layers at random ({key}), other ones on each rank, which would"
                " wait for these",
                fix=f"set model.args = {{ {key} = 0.0 }}",
            )


def _list_transformers_model_classes(auto: Any, config: Any) -> list[Any]:
    """The classes that can build `config`; the first is the default of a config that names none."""
    classes = auto._model_mapping[type(config)]
    if isinstance(classes, list | tuple):
        return list(classes)
    return [classes]


def _choose_attention_implementation(auto: Any, config: Any) -> str:
    """torch's own attention where the model has it, else the one that is written out."""
    classes = _list_transformers_model_classes(auto, config)
    architectures = config.architectures or ()
    chosen = next(filter(lambda model: model.__name__ in architectures, classes), classes[0])
    if getattr(chosen, "_supports_sdpa", False):
        return "sdpa"
    return EAGER_IMPLEMENTATION


def _load_module_with_weights(
    kind: str,
    auto: Any,
    config: Any,
    directory: Path,
    dtype: torch.dtype,
    attention: str,
    **options: str,
) -> nn.Module:
    """The module in evaluation mode. `options`: more arguments of `from_pretrained`."""
    # Nothing is downloaded, and nothing unpickled.
    module, loading_info = auto.from_pretrained(
        str(directory),
        config=config,
        dtype=dtype,
        attn_implementation=attention,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )
    for key_kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, loading_info.get(key_kind) or ()))
        if names:
            why = f"{key_kind.replace('_', ' ')}: {', '.join(names[:3])}"
            if len(names) > 3:
                why += " ..."
            raise LayoutError(
                f"the weights beside {kind} are not those of its config",
                why=why,
                fix="name the config.json itself to begin from random weights",
            )
    _require_tied_weights_are_one(module, directory)
    model: nn.Module = module
    return model


def _require_tied_weights_are_one(module: Any, directory: Path) -> None:
    """Raise LayoutError where transformers left two weights apart that the config ties: they
    differ in the files."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, kept_name in module.get_expanded_tied_weights_keys(all_submodels=True).items():
        pair = parameters.get(name), parameters.get(kept_name)
        if None not in pair and pair[0] is not pair[1]:
            raise build_separate_weights_error(directory, name, kept_name)


def _adapt_module_to_phalanx(module: Any, config: Any) -> nn.Module:
    """Give it a forward of inputs and positions that the objective can read, its blocks' names,
    rules and facts."""
    original_class = type(module)
    reads_images = module.main_input_name == "pixel_values"
    if reads_images:
        head, forward = "", _make_image_forward(original_class)
    else:
        head = find_plain_head(module)
        forward = _make_token_forward(original_class, head)
    names = {
        "__module__": original_class.__module__,
        "__qualname__": original_class.__qualname__,
        "forward": forward,
    }
    module.__class__ = type(original_class.__name__, (original_class,), names)
    pattern = _find_block_name_pattern(module)
    if pattern:
        module.block_pattern = pattern
    facts = _read_shape_facts_of_config(config, reads_images=reads_images)
    if reads_images and not (facts["image_size"] and facts["num_channels"]):
        raise LayoutError(
            f"a {config.model_type} has no one image_size, and images are squares of one size"
        )
    setattr(module, SHAPE_FACTS_ATTRIBUTE, facts)
    module.shard_rules = build_hugging_face_shard_rules(module, config, has_plain_head=bool(head))
    return module  # type: ignore[no-any-return]


def _make_token_forward(original_class: type, head: str) -> Callable[..., Any]:
    """A forward of token ids. It returns hidden states if the model has a plain head of this name,
    because the objective then owns the head; else logits."""

    def forward_to_logits(
        self: Any, inputs: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        named = {}
        if takes_positions:
            named["position_ids"] = positions
        # A cache of keys and values is for generation, one token after another.
        outputs = original_class.forward(  # type: ignore[attr-defined]
            self, input_ids=inputs, use_cache=False, return_dict=True, **named
        )
        return outputs.logits  # type: ignore[no-any-return]

    def forward_to_hidden_states(
        self: Any, inputs: torch.Tensor, positions: torch.Tensor | None = None
    ) -> HeadOutput:
        recorder = HeadInputRecorder()
        with replacing_submodule(self, head, recorder) as layer:
            forward_to_logits(self, inputs, positions)
        return build_head_output(layer, recorder)

    takes_positions = "position_ids" in inspect.signature(original_class.forward).parameters  # type: ignore[attr-defined]
    if head:
        return forward_to_hidden_states
    return forward_to_logits


def _make_image_forward(original_class: type) -> Callable[..., torch.Tensor]:
    def forward(self: Any, inputs: torch.Tensor) -> torch.Tensor:
        outputs = original_class.forward(self, pixel_values=inputs, return_dict=True)  # type: ignore[attr-defined]
        return outputs.logits  # type: ignore[no-any-return]

    return forward


def _find_block_name_pattern(module: Any) -> str | None:
    """ "model.layers.*": the first list of what transformers says is not to be split."""
    unsplit_classes = set(getattr(module, "_no_split_modules", None) or ())
    for name, part in module.named_modules():
        if not isinstance(part, nn.ModuleList) or not len(part):
            continue
        if {type(item).__name__ for item in part} <= unsplit_classes:
            return f"{name}.*"
    return None


def _read_shape_facts_of_config(config: Any, *, reads_images: bool) -> dict[str, int]:
    def read_first_int_setting(*keys: str) -> int:
        for key in keys:
            size = getattr(config, key, None)
            if isinstance(size, int):
                return int(size)
        return 0

    if reads_images:
        return {
            "image_size": read_first_int_setting("image_size"),
            "patch_size": read_first_int_setting("patch_size"),
            "num_channels": read_first_int_setting("num_channels"),
            "num_classes": read_first_int_setting("num_labels"),
        }
    return {
        "vocab_size": read_first_int_setting("vocab_size"),
        "max_positions": read_first_int_setting("n_positions", "max_position_embeddings"),
    }
