import json
from pathlib import Path

import pytest
from lab.problems import refused

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.huggingface.chat_template import CHATML, ChatTemplate, find_template

REPLY = " <think>hm</think> yes \n"
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "same"},
    {"role": "assistant", "content": "same"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": REPLY},
]
TRIMMED = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{{ eos_token }}{% endfor %}"
FORGETFUL = (
    "{% for m in messages %}({{ m.role }})"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}.{% endfor %}"
)
MARKED = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"


def replies(source: str, messages=TALK) -> list[str]:
    text, spans = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).replies(messages)
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, ["same", REPLY]),
        (TRIMMED, ["same", "<think>hm</think> yes"]),
        (FORGETFUL, ["same", REPLY]),
        (MARKED, ["same", REPLY]),
    ],
    ids=["chatml", "trimmed", "forgetful", "marked"],
)
def test_replies_are_found_whatever_the_template_does_to_them(source, expected):
    assert replies(source) == expected


def test_thoughts_that_a_template_leaves_out_are_not_learnt():
    earlier = [TALK[1], {"role": "assistant", "content": "<think>hm</think>no"}, *TALK[3:]]
    assert replies(FORGETFUL, earlier) == ["no", REPLY]


def test_the_text_is_the_one_of_transformers(hf_folder):
    transformers = pytest.importorskip("transformers")
    folder = hf_folder("llama")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": TRIMMED}
        )
    )
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    template = find_template(folder / "tokenizer.json", None)
    assert template.render(TALK) == theirs.apply_chat_template(TALK, tokenize=False)


def test_a_template_is_looked_for_in_its_places(tmp_path: Path):
    tokenizer, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    with refused(RecipeError, "missing_file", "data.chat_template", "no chat template"):
        find_template(tokenizer, None)
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    config.write_text(json.dumps({"chat_template": named, "eos_token": {"content": "</s>"}}))
    assert find_template(tokenizer, None) == ChatTemplate("yes", {"eos_token": "</s>"})
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert find_template(tokenizer, None).source == "newer"
    assert find_template(tokenizer, "chatml").source == CHATML
    with pytest.raises(RecipeError, match="no such file: "):
        find_template(tokenizer, "nothing.jinja")


def test_a_template_reaches_nothing_outside():
    with pytest.raises(ValueError, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render(TALK)
    with pytest.raises(ValueError, match="no system prompt"):
        ChatTemplate("{{ raise_exception('no system prompt') }}", {}).render(TALK)
    with refused(RecipeError, "bad_template", "", "not valid Jinja"):
        ChatTemplate("{% if %}", {}).render(TALK)


def test_a_template_that_ends_its_process_does_not_end_the_next(monkeypatch):
    monkeypatch.setattr("trainspec_cli.data.huggingface.chat_template.CPU_LIMIT_S", 0.3)
    source = "{% if messages[0].content == 'loop' %}{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}"
    template = ChatTemplate(source + "{% endfor %}{% endif %}{{ messages[0].content }}", {})
    with pytest.raises(ValueError, match=r"more than 0\.3 s"):
        template.render([{"role": "user", "content": "loop"}])
    assert template.render([{"role": "user", "content": "short"}]) == "short"


def test_only_the_default_of_several_templates_is_taken(tmp_path: Path):
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "rag", "template": "no"}]}))
    with refused(RecipeError, "missing_file", "data.chat_template", "no chat template"):
        find_template(tmp_path / "tokenizer.json", None)
    config.write_text("{")
    with pytest.raises(RecipeError) as raised:
        find_template(tmp_path / "tokenizer.json", None)
    assert raised.value.problems[0].code == "bad_template"


def test_the_reply_is_asked_for_only_where_it_is_wanted():
    template = ChatTemplate("{{ add_generation_prompt }} {{ bos_token }} {{ tools }}", {"bos_token": "<s>"})
    assert template.render([]) == "False <s> "
    assert template.render([], asks=True, tools=[1]) == "True <s> [1]"
    assert template.replies([], tools=[1]) == ("False <s> [1]", [])


def test_a_template_that_refuses_without_a_word_has_refused() -> None:
    with pytest.raises(ValueError, match=r"template failed: $"):
        ChatTemplate("{{ raise_exception('') }}", {}).render(TALK)
