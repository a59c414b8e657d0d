"""Models of transformers that do not call AttentionInterface are refused by name, and what `register` replaces."""

import re

import pytest
import torch
import transformers
from models import SMALL, build, close, run

from tilewise.integrations import transformers as integration

# Models that do not call AttentionInterface, and where the error says that their attention is. Made from their default
# configurations, without memory.
OWN_ATTENTION = {
    "BigBirdModel": "BigBirdModel computes its attention by itself, in .*BigBirdBlockSparseAttention",
    "BlipModel": "BlipTextModel computes its attention by itself, in .*BlipTextSelfAttention",
    "BloomModel": "BloomModel computes its attention by itself, in BloomAttention,",
    "DebertaModel": "DebertaModel computes its attention by itself, in DebertaAttention, DisentangledSelfAttention,",
    "DebertaV2ForMaskedLM": "DebertaV2Model computes its attention by itself, in .*DisentangledSelfAttention,",
    "MPNetModel": "MPNetModel computes its attention by itself, in MPNetAttention, MPNetSelfAttention,",
    "ReformerModel": "ReformerModel computes its attention by itself, in LSHSelfAttention, LocalSelfAttention,",
    "Swinv2Model": "Swinv2Model computes its attention by itself, in Swinv2Attention, Swinv2SelfAttention,",
    "WavLMModel": "WavLMModel computes its attention by itself, in WavLMAttention,",  # by torch's own function
    "XLNetModel": "XLNetModel computes its attention by itself, in XLNetRelativeAttention,",
    "YosoModel": "YosoModel computes its attention by itself, in YosoAttention, YosoSelfAttention,",
    # a dictionary of classes
    "BarkSemanticModel": "the model of BarkSemanticConfig takes its attention from BARK_ATTENTION_CLASSES,",
    "Data2VecVisionModel": "the model of Data2VecVisionConfig takes .* from DATA2VEC_VISION_SELF_ATTENTION_CLASSES,",
    "DeepseekVLHybridModel": "the model of SamVisionConfig takes its attention from SAM_VISION_ATTENTION_CLASSES,",
    "FalconForCausalLM": "the model of FalconConfig takes its attention from FALCON_ATTENTION_CLASSES,",
    "GPTJModel": "the model of GPTJConfig takes its attention from GPTJ_ATTENTION_CLASSES,",
    "GPTNeoModel": "the model of GPTNeoConfig takes its attention from GPT_NEO_ATTENTION_CLASSES,",
    "GitModel": "the model of GitConfig takes its attention from GIT_SELF_ATTENTION_CLASSES,",
    "SamModel": "the model of SamVisionConfig takes its attention from SAM_VISION_ATTENTION_CLASSES,",
    # one submodel of several
    "ClapModel": "ClapAudioModel computes its attention by itself, in .*ClapAudioSelfAttention,",
    "JanusModel": "JanusVQVAE computes its attention by itself, in JanusVQVAEAttnBlock,",
    "LongT5Model": "LongT5Stack computes its attention by itself, in .*LongT5LocalAttention,",
}
KNOWN = ("BloomModel", "DebertaV2ForMaskedLM", "MPNetModel")  # to `use_bias_terms`


def make(name, implementation):
    cls = getattr(transformers, name)
    with torch.device("meta"):
        return cls._from_config(cls.config_class(), attn_implementation=implementation)


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_a_model_with_an_attention_of_its_own_is_refused(name):
    message = rf'^attn_implementation: {OWN_ATTENTION[name]}.* "tilewise" cannot run it; (use|load it with) "eager"'
    with pytest.raises(ValueError, match=message) as error:
        make(name, "tilewise")
    instead = "load it with .* and call use_bias_terms" if name in KNOWN else "use "
    assert re.search(rf"cannot run it; {instead}", str(error.value))
    for implementation in ("eager", "sdpa"):
        if f'"{implementation}"' in str(error.value):  # what the error says to use
            make(name, implementation)


# Siglip pools by an nn.MultiheadAttention, Aria projects by one. The last two have no attention at all.
@pytest.mark.parametrize(
    "name",
    [
        "BertModel", "GPT2Model", "LlamaModel", "T5Model", "CLIPModel", "SiglipModel", "AriaModel", "MambaModel",
        "FNetModel",
    ],
)  # fmt: skip
def test_other_models_are_not_refused(name):
    assert make(name, "tilewise").config._attn_implementation == "tilewise"


def test_parts_of_a_model_that_can_run():
    """What the error says to do if only a part of a model is refused."""
    model = make("ClapModel", {"text_config": "tilewise"})
    assert model.text_model.config._attn_implementation == "tilewise"
    assert model.audio_model.config._attn_implementation != "tilewise"


class AttentionPooling(torch.nn.Module):
    """Named as attention, as many a head of users is, and not what attn_implementation is about."""


class Pooled(transformers.BertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.pooling = AttentionPooling()
        self.bert = transformers.BertModel(config)
        self.post_init()


class Alone(transformers.BertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.attention = torch.nn.MultiheadAttention(8, 2)
        self.post_init()


def test_models_of_the_users_own():
    config = transformers.BertConfig(**SMALL)
    Pooled._from_config(config, attn_implementation="tilewise")
    with pytest.raises(ValueError, match="Alone computes its attention by itself, in MultiheadAttention,"):
        Alone._from_config(config, attn_implementation="tilewise")
    Alone._from_config(config, attn_implementation="eager")


def test_setting_the_implementation_later(calls):
    model = build("bert", "eager").eval()
    expected = run(model, "bert", None)
    model.set_attn_implementation("tilewise")
    close(run(model, "bert", None), expected)
    assert len(calls) == 2
    # The layers of Git come from a dictionary, beside a vision model that calls the interface; PegasusX's from no
    # dictionary, in an encoder with the decoder's config.
    for name, message in (
        ("GitModel", "GitModel computes its attention by itself, in GitAttention, GitSelfAttention,"),
        ("PegasusXModel", "PegasusXEncoder computes its attention by itself, in PegasusXGlobalLocalAttention,"),
    ):
        model = make(name, "eager")
        with pytest.raises(ValueError, match=message):
            model.set_attn_implementation("tilewise")
        assert model.config._attn_implementation == "eager"


def test_unregister():
    from transformers.models.falcon.modeling_falcon import FALCON_ATTENTION_CLASSES

    methods = "get_correct_attn_implementation", "post_init"
    with pytest.raises(ValueError, match="FALCON_ATTENTION_CLASSES"):
        make("FalconModel", "tilewise")
    assert "tilewise" in FALCON_ATTENTION_CLASSES
    try:
        integration.unregister()
        assert list(FALCON_ATTENTION_CLASSES) == ["eager", "sdpa", "flash_attention_2"]
        for name in methods:
            assert getattr(transformers.PreTrainedModel, name).__module__ == "transformers.modeling_utils"
        assert "tilewise" not in transformers.AttentionInterface()
        assert "tilewise" not in transformers.AttentionMaskInterface()
        with pytest.raises(ValueError, match='Specified `attn_implementation="tilewise"` is not supported'):
            build("bert", "tilewise")
        integration.unregister()
    finally:
        integration.register()
    build("bert", "tilewise")
    for name in methods:
        assert getattr(transformers.PreTrainedModel, name).__module__ == integration.__name__
    with pytest.raises(ValueError, match="FALCON_ATTENTION_CLASSES"):
        make("FalconModel", "tilewise")


def test_registering_twice_changes_nothing():
    def state():
        return (dict(transformers.AttentionInterface()), dict(transformers.AttentionMaskInterface()),
                dict(vars(transformers.PreTrainedModel)))  # fmt: skip

    before = state()
    integration.register()
    after = state()
    assert before == after
    assert after[0]["tilewise"] is integration.attention_forward
    assert after[1]["tilewise"] is integration.attention_mask
