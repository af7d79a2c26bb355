"""A zoo of tiny real architectures with random weights: nothing is downloaded, each traces in a second or two.

Every function returns an :class:`Example`, which unpacks as ``module, inputs, loss_fn``. The same call gives the same
weights and inputs. ``ZOO`` holds them all by name.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SEED = 0
VOCABULARY = 64
BATCH = 2
LENGTH = 8


class Function(nn.Module):
    """A function as a module; where it has parts, a function of the module that holds them and of the inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function, self.holds = function, bool(parts)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs) if self.holds else self.function(*inputs)


class Example(NamedTuple):
    module: nn.Module
    inputs: tuple[Tensor, ...]
    loss_fn: Callable[[Any], Tensor]
    """From what the module returns to a scalar."""


def _tokens(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(SEED + 1))


def _floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED + 2))


def logits(model: Any, tokens: Tensor, target: Tensor | None = None) -> Tensor:
    """What a Hugging Face language model makes of tokens, and of an encoder-decoder's targets, without its cache."""
    more = {} if target is None else {"decoder_input_ids": target}
    return model.model(input_ids=tokens, use_cache=False, **more).logits


class Layers(nn.Module):
    """Blocks one after the other, by the name that decoders give them; ``end`` takes what the last returns."""

    end: Callable[[Tensor], Tensor] | None = None

    def __init__(self, *layers: nn.Module, end: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layers, self.end = nn.ModuleList(layers), end

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if self.end is None else self.end(x)


def broken(**parts: nn.Module) -> nn.Module:
    """Two parts, and a break of the graph between them."""
    first, second = parts

    def forward(model: Any, x: Tensor) -> Tensor:
        x = getattr(model, first)(x).sin()
        torch._dynamo.graph_break()
        return getattr(model, second)(x).cos()

    return Function(forward, **parts)


def next_token_loss(logits: Tensor) -> Tensor:
    """Cross entropy against targets drawn from the shape alone, so that it also traces with symbolic sizes."""
    flat = logits.flatten(0, 1).float()
    targets = torch.arange(flat.shape[0], device=flat.device) * 7 % VOCABULARY
    return nn.functional.cross_entropy(flat, targets)


def square_loss(output: Tensor) -> Tensor:
    return output.float().square().mean()


def hugging_face(config_name: str, model_name: str, **settings: Any) -> nn.Module:
    """A model of random weights, the same each time."""
    import transformers

    torch.manual_seed(SEED)
    config = getattr(transformers, config_name)(vocab_size=VOCABULARY, use_cache=False, **settings)
    config._attn_implementation = "sdpa"
    return getattr(transformers, model_name)(config).train()


def decoder(family: str, layers: int, *, length: int = LENGTH, hidden: int = 32, **settings: Any) -> Example:
    """A decoder of Hugging Face with grouped queries."""
    model = hugging_face(
        f"{family}Config",
        f"{family}ForCausalLM",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(64, length),
        **{"intermediate_size": 2 * hidden, **settings},
    )
    return Example(Function(logits, model=model), (_tokens(length=length),), next_token_loss)


def llama(layers: int = 2, hidden: int = 32, length: int = LENGTH) -> Example:
    return decoder("Llama", layers, length=length, hidden=hidden)


def qwen3(layers: int = 2) -> Example:
    return decoder("Qwen3", layers, head_dim=8)


def mixtral(layers: int = 2) -> Example:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return decoder("Mixtral", layers, intermediate_size=32, sliding_window=None, **experts)


def gpt2(layers: int = 2, dropout: float = 0.1) -> Example:
    """Dropout in train mode: on the embeddings, inside attention and on both residuals."""
    sizes = {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 64}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    model = hugging_face("GPT2Config", "GPT2LMHeadModel", **sizes, **rates, bos_token_id=0, eos_token_id=2)
    return Example(Function(logits, model=model), (_tokens(),), next_token_loss)


def bart(layers: int = 1) -> Example:
    """An encoder-decoder with cross attention and a tied embedding."""
    sides = {"layers": layers, "attention_heads": 4, "ffn_dim": 64}
    model = hugging_face(
        "BartConfig",
        "BartForConditionalGeneration",
        d_model=32,
        max_position_embeddings=64,
        **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sides.items()},
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    return Example(Function(logits, model=model), (_tokens(), _tokens(length=6)), next_token_loss)


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + x)  # a local outlives its reader


class ResNet(Layers):
    def __init__(self, blocks: int, channels: int) -> None:
        nn.Module.__init__(self)
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList(_Residual(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(self.stem(x)).mean((2, 3)))


def resnet(blocks: int = 2, channels: int = 4) -> Example:
    """BatchNorm in train mode: running statistics and a counter are written by the graph."""
    torch.manual_seed(SEED)
    return Example(ResNet(blocks, channels).train(), (_floats(2, 3, 6, 6),), square_loss)


def _feed_forward(width: int) -> Function:
    up, down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    return Function(lambda block, x: x + block.down(nn.functional.gelu(block.up(x))), up=up, down=down)


def MLP(layers: int, width: int) -> Layers:
    return Layers(*(_feed_forward(width) for _ in range(layers)))


def products(layers: int = 2, width: int = 8) -> Example:
    """Products alone, for which Inductor takes no C++ compiler."""
    torch.manual_seed(SEED)
    linears = ([nn.Linear(width, width, bias=False) for _ in range(2)] for _ in range(layers))
    return Example(Layers(*(nn.Sequential(*pair) for pair in linears)), (_floats(4, width),), square_loss)


def mlp(layers: int = 3, width: int = 16, rows: int = 4) -> Example:
    torch.manual_seed(SEED)
    return Example(MLP(layers, width), (_floats(rows, width),), square_loss)


class SharedParameters(Layers):
    """The same block twice, and an embedding that is also the output projection."""

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(VOCABULARY, width)
        block = _feed_forward(width)
        self.layers = nn.ModuleList([block, _feed_forward(width), block])
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(super().forward(self.embedding(tokens)))


def shared_parameters(width: int = 16) -> Example:
    torch.manual_seed(SEED)
    return Example(SharedParameters(width), (_tokens(),), next_token_loss)


def aliased_output(width: int = 16) -> Example:
    """Returns a view of its input, a view of an activation, and the activation itself."""

    def forward(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = module.linear(x).sin()
        return x.view(-1), hidden.t(), hidden

    torch.manual_seed(SEED)
    model, x = Function(forward, linear=nn.Linear(width, width)), _floats(4, width).requires_grad_()
    return Example(model, (x,), lambda out: sum(square_loss(part) for part in out))  # type: ignore[arg-type,return-value]


class FlexAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )

        def causal(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return torch.where(q_idx >= kv_idx, score, -float("inf"))

        out = flex_attention(q, k, v, score_mod=causal)
        return x + self.out(out.transpose(1, 2).reshape(batch, length, width))


def flex(layers: int = 2, width: int = 32, heads: int = 2, length: int = 16) -> Example:
    """flex_attention: a higher-order operator with subgraphs.

    Torch refuses its backward on a CPU because Inductor has no kernel there; traced, or run by an eager inner
    backend, it works, so the refusal is taken out.
    """
    from torch.nn.attention import flex_attention as library

    library._validate_device = lambda query, key, value: None
    torch.manual_seed(SEED)
    model = Layers(*(FlexAttention(width, heads) for _ in range(layers)))
    return Example(model, (_floats(2, length, width),), square_loss)


class Counter(nn.Module):
    """A counter and a cache that the forward reads, then writes, then reads again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.count: Tensor
        self.cache: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("cache", torch.full((4, width), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        scale = (self.count + 1.0).rsqrt()
        self.count += 1
        hidden = self.linear(x) * scale
        seen = self.cache.sin()
        self.cache[1:3] = hidden[1:3].detach()
        return (hidden * seen).cos()


def counter(width: int = 16) -> Example:
    torch.manual_seed(SEED)
    return Example(Counter(width), (_floats(4, width),), square_loss)


class Dropout(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.5, training=True).sin()
        return x


def dropout(width: int = 16) -> Example:
    torch.manual_seed(SEED)
    return Example(Dropout(_feed_forward(width), _feed_forward(width)), (_floats(4, width),), square_loss)


HUGGING_FACE = ("llama", "qwen3", "mixtral", "gpt2", "bart")
_ALL = (llama, qwen3, mixtral, gpt2, bart, resnet, mlp, shared_parameters, aliased_output, flex, counter, dropout)
ZOO: dict[str, Callable[[], Example]] = {each.__name__: each for each in _ALL}
