"""Frameworks that train models, with loops of their own, under a policy: PEFT, Accelerate, Lightning, and torchao.

Each where it installs (the extra ``frameworks``). To the bit: losses, gradients, weights.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policylang
from tests.support import frameworks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error::policylang.errors.PolicyWarning")]

LINEARS = ["q_proj", "v_proj", "down_proj"]
BOTH = pytest.mark.parametrize("way", list(frameworks.WAYS))


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft")


def _adapters(peft: Any) -> dict[str, Any]:
    task = {"task_type": "CAUSAL_LM"}
    lora = {"r": 4, "lora_dropout": 0.1, "target_modules": LINEARS, "init_lora_weights": False, **task}
    return {
        "LoRA": peft.LoraConfig(**lora),
        "DoRA": peft.LoraConfig(use_dora=True, **lora),
        "IA3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **task),
        "LoHa": peft.LoHaConfig(r=4, target_modules=LINEARS, **task),
        "OFT": peft.OFTConfig(oft_block_size=8, target_modules=["q_proj"], **task),
        "norms": peft.LNTuningConfig(target_modules=["input_layernorm"], **task),
        "prompt": peft.PromptTuningConfig(num_virtual_tokens=3, **task),
        "encoded prompt": peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16, **task),
        "prefix": peft.PrefixTuningConfig(num_virtual_tokens=3, **task),
    }


ADAPTERS = ("LoRA", "DoRA", "IA3", "LoHa", "OFT", "norms", "prompt", "encoded prompt", "prefix")


def _adapted(peft: Any, name: str) -> Any:
    model = frameworks.llama()
    torch.manual_seed(2)
    return peft.get_peft_model(model, _adapters(peft)[name])


@pytest.mark.parametrize("name", ADAPTERS)
@BOTH
def test_adapters(peft: Any, name: str, way: str) -> None:
    if (name, way) == ("prefix", "the switch"):
        pytest.skip("PEFT refuses prefixes where the model has checkpoints of its own")
    frameworks.check(lambda: _adapted(peft, name), frameworks.by_hand, way)


@BOTH
def test_adapters_that_are_merged_switched_and_off(peft: Any, way: str) -> None:
    def make() -> Any:
        model = _adapted(peft, "LoRA")
        torch.manual_seed(3)
        model.add_adapter("other", _adapters(peft)["LoRA"])
        return model

    def loop(model: Any) -> list[Tensor]:
        losses = frameworks.by_hand(model, steps=1)
        model.set_adapter("other")
        losses += frameworks.by_hand(model, steps=1)
        with model.disable_adapter():
            losses.append(frameworks.causal_loss(model, frameworks.batches(1)[0]))
        model.merge_adapter()
        losses.append(frameworks.causal_loss(model, frameworks.batches(1)[0]))
        model.unmerge_adapter()
        model.set_adapter("default")
        return losses + frameworks.by_hand(model, steps=1)

    frameworks.check(make, loop, way)


@BOTH
def test_an_adapter_that_is_saved_loaded_and_merged_for_good(peft: Any, way: str, tmp_path: Path) -> None:
    def run(model: Any) -> frameworks.Trained:
        frameworks.by_hand(model)
        model.save_pretrained(tmp_path / "adapter")
        base = frameworks.llama()
        own = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
        ours = frameworks.WAYS[way](own) if model.policy else own
        again = frameworks.Trained.by(frameworks.by_hand, ours)
        merged = ours.merge_and_unload()
        merged.requires_grad_(True)
        again.losses.extend(frameworks.by_hand(merged))
        return again

    found = []
    for policy in (False, True):
        model = _adapted(peft, "LoRA")
        model.policy = policy
        found.append(run(frameworks.WAYS[way](model) if policy else model))
    assert frameworks.differences(*found) == []


@pytest.mark.parametrize("precision", ["no", "bf16"])
@BOTH
def test_accelerate(way: str, precision: str) -> None:
    frameworks.check(frameworks.llama, partial(frameworks.accelerated, precision=precision), way)


@pytest.fixture
def lightning() -> Any:
    pytest.importorskip("lightning")
    import lightning.pytorch as library

    return library


def _lit(library: Any, manual: bool) -> Callable[[nn.Module], Any]:
    class Lit(library.LightningModule):  # type: ignore[misc]
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.losses = model, []
            self.automatic_optimization = not manual

        def training_step(self, tokens: Tensor, number: int) -> Tensor | None:
            loss = frameworks.causal_loss(self.model, tokens)
            self.losses.append(loss.detach())
            if not manual:
                return loss
            optimizer = self.optimizers()
            for part in (loss, frameworks.causal_loss(self.model, tokens.flip(1))):
                self.manual_backward(part)
            optimizer.step()
            optimizer.zero_grad()
            return None

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=1e-2)

    return Lit


@pytest.mark.parametrize("kind", ["automatic", "manual", "swa", "ema", "bf16"])
@BOTH
@pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_lightning(lightning: Any, kind: str, way: str) -> None:
    def loop(model: nn.Module) -> list[Tensor]:
        from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

        averages = {
            "swa": lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=1)],
            "ema": lambda: [EMAWeightAveraging(decay=0.5)],
        }
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=3,
            callbacks=averages.get(kind, list)(),
            precision="bf16-mixed" if kind == "bf16" else "32-true",
            accumulate_grad_batches=1 if kind in ("manual", "swa") else 2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = _lit(lightning, manual=kind == "manual")(model)
        trainer.fit(module, torch.utils.data.DataLoader(frameworks.batches(4), batch_size=None))
        return list(module.losses)

    frameworks.check(frameworks.llama, loop, way)


@pytest.fixture
def torchao() -> Any:
    return pytest.importorskip("torchao")


def _quantized(model: nn.Module) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: name.endswith(("o_proj", "up_proj")))
    for name, each in model.named_parameters():
        each.requires_grad_(not name.endswith(("o_proj.weight", "up_proj.weight")))
    return model


def _trained_quantization(model: nn.Module) -> Any:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.qat import QATConfig

    base = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    quantize_(model, QATConfig(base, step="prepare"), lambda module, name: "layers" in name and name.endswith("_proj"))
    return model


@pytest.mark.parametrize("change", [_quantized, _trained_quantization], ids=["int8 weights", "trained quantization"])
@BOTH
def test_quantized_weights(torchao: Any, change: Callable[[nn.Module], nn.Module], way: str) -> None:
    frameworks.check(lambda: change(frameworks.llama()), frameworks.by_hand, way)


@BOTH
def test_an_optimizer_in_eight_bits(torchao: Any, way: str) -> None:
    from torchao.optim import AdamW8bit

    frameworks.check(
        frameworks.llama, lambda model: frameworks.by_hand(model, AdamW8bit(model.parameters(), lr=1e-2)), way
    )


@BOTH
def test_generation_between_steps(way: str) -> None:
    def loop(model: Any) -> list[Tensor]:
        losses = frameworks.by_hand(model, steps=1)
        tokens = model.eval().generate(frameworks.batches(1)[0], max_new_tokens=4, do_sample=False)
        model.train()
        return [*losses, tokens, *frameworks.by_hand(model, steps=1)]

    frameworks.check(frameworks.llama, loop, way)


@BOTH
def test_copies_that_are_saved_and_loaded(way: str, tmp_path: Path) -> None:
    """``save_pretrained`` and ``from_pretrained``, ``assign=True``, and a copy that is trained beside its model."""
    from transformers import LlamaForCausalLM

    def loop(model: Any) -> list[Tensor]:
        losses = frameworks.by_hand(model, steps=1)
        losses += frameworks.by_hand(copy.deepcopy(model), steps=1)
        model.save_pretrained(tmp_path)
        state = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
        model.load_state_dict({name: each * 1.01 for name, each in state.items()}, assign=True)
        return losses + frameworks.by_hand(model, steps=2)

    frameworks.check(lambda: frameworks.llama(tie_word_embeddings=False), loop, way)


def test_policies_reports_and_wrappers_know_one_another(peft: Any) -> None:
    """The function was made for the base model: the report of the wrapper is the same."""
    base = frameworks.llama()
    frameworks.the_switch(base)
    model = peft.get_peft_model(base, _adapters(peft)["LoRA"])
    frameworks.by_hand(model, steps=1)
    assert str(policylang.report(model)) == str(policylang.report(base))
    other = frameworks.own_checkpoints(_adapted(peft, "LoRA"))
    frameworks.by_hand(other, steps=1)
    assert policylang.report(other).policy == frameworks.POLICY
