"""Token ids: what starts and ends a sequence, and what is cut, counted and dropped."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlhf.data import tokenize
from rlhf.data.rows import Message
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.recipe.schema_model import Tokenizer as RecipeTokenizer

TEXTS = ["\n\nHuman: What is the capital of France?\n\nAssistant: The capital is Paris."] * 20
PROMPT = (Message("user", "What is the capital of France?"),)
LONG = (Message("user", "What " * 30 + "is the capital?"),)


@pytest.fixture(scope="module")
def tokenizer() -> DialogueTokenizer:
    return DialogueTokenizer(tokenize.train(TEXTS, 300), "hh")


def test_a_sequence_is_bos_prompt_response_eos(tokenizer):
    (row,), counts = tokenizer.encode([(PROMPT, "The capital is Paris.")], 64, 128)
    assert row
    assert row.prompt[0] == tokenizer.hf.bos_token_id
    assert row.prompt[-1] == tokenizer.hf.convert_tokens_to_ids("\n\nAssistant:")
    assert row.response[-1] == tokenizer.eos_id
    assert tokenizer.eos_id not in row.response[:-1]
    assert tokenizer.decode(row.response) == "The capital is Paris."
    assert sum(counts.values()) == 0
    assert tokenizer.encode_prompts([PROMPT], 64)[0][0] == row.prompt


def test_any_text_survives_the_tokenizer(tokenizer):
    for text in ("naïve ☃ 日本\n\ttabs", "<eo s> & \x00", "Human: not a turn"):
        (row,), _ = tokenizer.encode([(PROMPT, text)], 512, 1024)
        assert row
        assert tokenizer.decode(row.response) == text


@pytest.mark.parametrize("bos", [True, False])
def test_of_a_prompt_that_is_cut_its_last_tokens_stay(bos):
    """The question stands at the end, and behind it what begins an answer."""
    hf = tokenize.train(TEXTS, 300)
    if not bos:
        hf.bos_token = None
    whole, cut = (DialogueTokenizer(hf, "hh").encode_prompts([LONG], length)[0][0] for length in (999, 12))
    assert cut == [*whole[:bos], *whole[bos - 12 :]]
    assert str(hf.decode(cut)).endswith("is the capital?\n\nAssistant:")
    (row,), _ = DialogueTokenizer(hf, "hh").encode([(LONG, "Paris.")], 12, 64)
    assert row and row.prompt == cut


@pytest.mark.parametrize("template", ["hh", "plain", "chat"])
def test_a_response_is_cut_at_the_eos_that_its_text_holds_and_that_is_counted(template):
    hf = tokenize.train(TEXTS, 300)
    eos = hf.eos_token
    hf.chat_template = f"{{% for m in messages %}}[{{{{ m['content'] }}}}{eos}\n{{% endfor %}}"
    tokenizer = DialogueTokenizer(hf, template)
    (whole, cut), counts = tokenizer.encode([(PROMPT, "a b"), (PROMPT, f"a b{eos} c d{eos}")], 128, 999)
    assert whole and cut and cut.response == whole.response and cut.response.count(tokenizer.eos_id) == 1
    assert counts["responses_cut"] == 1


def test_an_eos_with_nothing_behind_or_before_it_cuts_no_response(tokenizer):
    eos = tokenizer.hf.eos_token
    tokenizer = DialogueTokenizer(tokenizer.hf, "plain")
    (whole, same, none), counts = tokenizer.encode(
        [(PROMPT, "a b"), (PROMPT, f"a b{eos}"), (PROMPT, f"{eos}a")], 128, 999
    )
    assert whole and same == whole and none is None
    assert (counts["responses_cut"], counts["dropped"]) == (0, 1)


def test_a_cut_response_has_no_eos_and_is_counted(tokenizer):
    (whole,), _ = tokenizer.encode([(PROMPT, "The capital is Paris.")], 64, 999)
    limit = len(whole.prompt) + len(whole.response) - 1
    (row,), counts = tokenizer.encode([(PROMPT, "The capital is Paris.")], 64, limit)
    assert row
    assert row.response == whole.response[:-1]
    assert counts["responses_cut"] == 1
    (exact,), counts = tokenizer.encode([(PROMPT, "The capital is Paris.")], 64, limit + 1)
    assert exact == whole
    assert counts["responses_cut"] == 0


def test_a_row_that_loses_its_whole_response_is_dropped_and_counted(tokenizer):
    length = len(tokenizer.encode_prompts([PROMPT], 999)[0][0])
    rows, counts = tokenizer.encode([(PROMPT, "Paris."), (PROMPT, "Rome.")], length, length)
    assert rows == [None, None]
    assert counts["dropped"] == 2


def test_a_response_limit_of_its_own_counts_eos_and_what_it_cuts(tokenizer):
    rows = [(PROMPT, "The capital is Paris."), (PROMPT, "Paris.")]
    whole, _ = tokenizer.encode(rows, 64, 999)
    lengths = [len(row.response) for row in whole]
    limit = lengths[0] - 1
    assert lengths[1] <= limit
    cut, counts = tokenizer.encode(rows, 64, 999, limit)
    assert [row.prompt for row in cut] == [row.prompt for row in whole]
    assert [row.response for row in cut] == [whole[0].response[:limit], whole[1].response]
    assert counts["responses_cut"] == 1
    assert tokenizer.encode(rows, 64, 999, lengths[0]) == tokenizer.encode(rows, 64, 999)
    room = len(whole[0].prompt) + 2  # where the prompt leaves less than the limit, the smaller of the two counts
    assert len(tokenizer.encode(rows[:1], 64, room, limit)[0][0].response) == 2


def test_documents_are_cut_into_pieces_and_lose_nothing(tokenizer):
    whole = tokenizer.encode_texts(TEXTS[:1], 999)[0]
    pieces = tokenizer.encode_texts(TEXTS[:1], 5)
    assert all(len(piece) <= 5 for piece in pieces)
    assert [i for piece in pieces for i in piece] == whole
    assert (whole[0], whole[-1]) == (tokenizer.hf.bos_token_id, tokenizer.eos_id)


def settings(template: str, **keys: Any) -> RecipeTokenizer:
    """The recipe's section for a tokenizer in a folder."""
    return RecipeTokenizer.model_validate({"source": "local", "name": "tokenizer", "template": template, **keys})


def with_tokens(**tokens) -> PreTrainedTokenizerFast:
    raw = tokenize.train(TEXTS, 300)._tokenizer
    assert raw is not None
    raw.add_special_tokens([t for t in tokens.values() if isinstance(t, str)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, **tokens)


def test_padding_is_never_eos():
    """With pad = EOS the reward model would read its score one token too early."""
    tokenizer = DialogueTokenizer(with_tokens(eos_token="</s>", unk_token="<unk>"), "hh")
    assert tokenizer.pad_id == tokenizer.hf.unk_token_id
    tokenizer = DialogueTokenizer(with_tokens(eos_token="</s>", pad_token="</s>", unk_token="<unk>"), "hh")
    assert tokenizer.pad_id != tokenizer.eos_id
    with pytest.raises(UserError, match=r"tokenizer\.pad_token"):
        DialogueTokenizer(with_tokens(eos_token="</s>"), "hh")
    with pytest.raises(UserError, match="no end-of-sequence token"):
        DialogueTokenizer(with_tokens(pad_token="<p>"), "hh")


def test_a_tokenizer_without_padding_or_unknown_token_is_given_one_by_the_recipe():
    """Like those of Llama 3 and of Qwen's base models."""
    hf = with_tokens(eos_token="</s>", bos_token="<s>", pad_token="</s>")
    hf.add_special_tokens({"additional_special_tokens": ["<|reserved_0|>", "<|right_pad|>"]})
    with pytest.raises(UserError, match=r"such as <pad>, <\|right_pad\|>, <\|reserved_0\|>"):
        DialogueTokenizer(hf, "hh")
    size = len(hf)
    tokenizer = DialogueTokenizer(hf, "hh", "<|right_pad|>")
    assert tokenizer.pad_id == hf.convert_tokens_to_ids("<|right_pad|>") != tokenizer.eos_id
    assert len(tokenizer.hf) == size, "an entry more would need a row more of the embedding"
    for token in ("</s>", "<s>", "<no>"):
        with pytest.raises(UserError, match=f"tokenizer.pad_token: '{token}'"):
            DialogueTokenizer(hf, "hh", token)


def test_the_chat_template_is_the_tokenizers_own():
    hf = with_tokens(eos_token="</s>", pad_token="<p>", bos_token="<s>")
    with pytest.raises(UserError, match="no chat template"):
        DialogueTokenizer(hf, "chat")
    hf.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = DialogueTokenizer(hf, "chat")
    assert tokenizer.prompt_text(PROMPT) == "<s>[user]What is the capital of France?[assistant]"
    (row,), _ = tokenizer.encode([(PROMPT, "Paris")], 64, 128)
    assert row
    assert row.prompt.count(hf.bos_token_id) == 1  # the template writes it, and it is not put in twice
    assert tokenizer.decode(row.response) == "Paris"


def test_the_plain_template_writes_what_the_h100_guides_snippets_write():
    """Training on f"{instruction}\\n{input}\\n{output}", scoring f"{prompt}\\n{response}"."""
    tokenizer = DialogueTokenizer(with_tokens(eos_token="</s>", pad_token="<p>", bos_token="<s>"), "plain")
    instruction, given, output = "Name the capital.", "France", "The capital is Paris."
    prompt = (Message("user", f"{instruction}\n{given}"),)
    (row,), counts = tokenizer.encode([(prompt, output)], 64, 128)
    assert row
    text = f"{instruction}\n{given}\n{output}"
    assert tokenizer.hf.decode(row.prompt + row.response) == f"<s>{text}</s>"
    assert tokenizer.hf.decode(row.prompt) == f"<s>{instruction}\n{given}\n"
    assert tokenizer.encode_prompts([prompt], 64)[0][0] == row.prompt
    assert tokenizer.decode(row.response) == output
    assert not counts["merged_at_response"]
    several = (Message("user", "Hello."), Message("assistant", "Yes?"), Message("user", "Who are you?"))
    assert tokenizer.prompt_text(several) == "Hello.\nYes?\nWho are you?\n"


def test_the_response_is_written_as_the_template_writes_it():
    """Llama-2's template puts a space before the answer, and EOS after it; EOS must not be there twice."""
    hf = with_tokens(eos_token="</s>", pad_token="<p>", bos_token="<s>")
    hf.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token }}[INST] {{ m['content'] }} [/INST]"
        "{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = DialogueTokenizer(hf, "chat")
    (row,), counts = tokenizer.encode([(PROMPT, "Paris")], 64, 128)
    assert row
    whole = hf("<s>[INST] What is the capital of France? [/INST] Paris", add_special_tokens=False)["input_ids"]
    assert row.prompt + row.response == [*whole, tokenizer.eos_id]
    assert counts["merged_at_response"] == 0


def test_a_response_that_merges_with_the_prompt_is_encoded_apart_and_counted():
    hf = with_tokens(eos_token="</s>", pad_token="<p>")
    hf.add_tokens(["x]Par"])
    hf.chat_template = "[{% for m in messages %}{{ m['content'] }}{% endfor %}x]"
    tokenizer = DialogueTokenizer(hf, "chat")
    (row,), counts = tokenizer.encode([(PROMPT, "Paris")], 64, 128)
    assert row
    assert counts["merged_at_response"] == 1
    assert row.prompt == tokenizer.encode_prompts([PROMPT], 64)[0][0]
    assert tokenizer.decode(row.response) == "Paris"


THINKING = (  # the parts of Qwen3's that matter here, with a mark that training on answers alone needs
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{% if loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def chat_tokenizer(folder: Path, template: str, eos: str = "<|im_end|>", **tokens: str) -> Path:
    """A saved tokenizer with a chat template; the marks of a turn are special tokens."""
    tokenizer = with_tokens(eos_token=eos, pad_token="<p>", **tokens)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_thinking_is_switched_off_and_a_system_prompt_is_put_first(tmp_path):
    keys = {"chat_template_kwargs": {"enable_thinking": False}, "system_prompt": 'Say "yes" or {{ no }}.\n'}
    tokenizer = tokenize.load(chat_tokenizer(tmp_path, THINKING), settings("chat", **keys))
    system = '<|im_start|>system\nSay "yes" or {{ no }}.\n<|im_end|>\n'
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.prompt_text(PROMPT) == f"{system}{question}<think>\n\n</think>\n\n"
    (row,), counts = tokenizer.encode([(PROMPT, "Paris")], 256, 512)
    assert row and not counts["merged_at_response"]
    assert tokenizer.hf.decode(row.response) == "Paris<|im_end|>", "the empty thought belongs to the prompt"
    own = (Message("system", "Be brief."), *PROMPT)
    assert tokenizer.prompt_text(own).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    assert "yes" not in tokenizer.prompt_text(own)


DATED = "Today is {{ strftime_now('%d %b %Y') }}.\n" + THINKING
DATED_BY_LLAMA = (  # as Llama 3.2 has it
    "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ date_string }}\n" + THINKING
)


@pytest.mark.parametrize("template", [DATED, DATED_BY_LLAMA])
def test_a_template_that_writes_todays_date_is_refused_until_the_date_is_set(tmp_path, template):
    """A run that goes on after midnight would have other tokens, and so would the next one."""
    folder = chat_tokenizer(tmp_path, template)
    with pytest.raises(
        UserError, match=r"writes today's date, .*: tokenizer\.chat_template_kwargs: \{strftime_now: 26"
    ):
        tokenize.load(folder, settings("chat"))
    tokenizer = tokenize.load(folder, settings("chat", chat_template_kwargs={"strftime_now": "1 May 2020"}))
    assert "1 May 2020" in tokenizer.prompt_text(PROMPT).partition("\n")[0]
    tokenize.load(folder, settings("hh"))


def test_a_conversation_of_several_turns_continues_with_what_training_saw(tmp_path):
    turns = (*PROMPT, Message("assistant", "Paris"), Message("user", "Sure?"))
    tokenizer = tokenize.load(chat_tokenizer(tmp_path, THINKING), settings("chat"))
    (row,), counts = tokenizer.encode([(turns, "Yes")], 256, 512)
    assert row and not counts["merged_at_response"]
    rows = [{"role": m.role, "content": m.content} for m in turns]
    served: Any = tokenizer.hf.apply_chat_template(rows, add_generation_prompt=True)
    assert row.prompt == served["input_ids"]
    assert tokenizer.hf.decode(row.response) == "<think>\n\n</think>\n\nYes<|im_end|>"


def test_a_saved_chat_tokenizer_renders_what_training_saw(tmp_path):
    """What `merge` writes and any server reads."""
    keys = {"chat_template_kwargs": {"enable_thinking": False}, "system_prompt": "Be kind."}
    tokenizer = tokenize.load(chat_tokenizer(tmp_path / "a", THINKING), settings("chat", **keys))
    assert tokenizer.write_chat_template()
    tokenizer.hf.save_pretrained(tmp_path / "b")
    rows = [{"role": m.role, "content": m.content} for m in PROMPT]
    served: Any = AutoTokenizer.from_pretrained(tmp_path / "b").apply_chat_template(rows, add_generation_prompt=True)
    assert served["input_ids"] == tokenizer.encode_prompts([PROMPT], 256)[0][0]


def test_an_answer_must_end_with_the_token_at_which_sampling_stops(tmp_path):
    """Gemma's tokenizer ends texts with <eos>, its template ends turns with <end_of_turn>."""
    folder = chat_tokenizer(tmp_path, THINKING, eos="</s>")
    with pytest.raises(UserError, match=r"ends an answer with <\|im_end\|>, .* is </s>: set tokenizer.eos_token"):
        tokenize.load(folder, settings("chat"))
    tokenizer = tokenize.load(folder, settings("chat", eos_token="<|im_end|>"))
    (row,), _ = tokenizer.encode([(PROMPT, "Paris")], 256, 512)
    assert row and row.response[-1] == tokenizer.eos_id == tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    with pytest.raises(UserError, match=r"tokenizer\.eos_token: '<no>' is not in the vocabulary"):
        tokenize.load(folder, settings("chat", eos_token="<no>"))


def test_a_chat_prompt_has_bos_where_its_template_writes_it(tmp_path):
    """Granite's tokenizer has one that its template does not write."""
    for number, (template, count) in enumerate(((THINKING, 0), ("{{ bos_token }}" + THINKING, 1))):
        tokenizer = tokenize.load(chat_tokenizer(tmp_path / str(number), template, bos_token="<s>"), settings("chat"))
        (row,), _ = tokenizer.encode([(PROMPT, "Paris")], 256, 512)
        assert row and row.prompt.count(tokenizer.hf.bos_token_id) == count


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A tokenizer that begins a text with a space, as Llama's does."""
    raw = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    special = ["<unk>", "<s>", "</s>"]
    texts = ["Hello. Yes? Who are you?\n\nHuman: \n\nAssistant: ▁"] * 5
    raw.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=80, special_tokens=special, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("template", ["hh", "plain"])
@pytest.mark.parametrize("made", [sentencepiece_like, lambda: tokenize.train(["Hello. Yes? Who are you?"] * 9, 300)])
def test_a_chat_interface_makes_the_ids_that_training_made(made, template):
    tokenizer = DialogueTokenizer(made(), template)
    assert tokenizer.write_chat_template()
    for said in ([Message("system", "Hello."), Message("user", "Who?")], [Message("user", "Yes?")]):
        rows = [{"role": m.role, "content": m.content} for m in said]
        found: Any = tokenizer.hf.apply_chat_template(rows, add_generation_prompt=True)
        assert found["input_ids"] == tokenizer.encode_prompts([said], 999)[0][0]


def test_special_tokens_that_carry_meaning_stay_in_the_text():
    hf = tokenize.words(300)
    hf.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    tokenizer = DialogueTokenizer(hf, "hh")
    think, end = (hf.get_vocab()[token] for token in ("<think>", "</think>"))
    (word,) = hf(" 15", add_special_tokens=False)["input_ids"][-1:]
    text = tokenizer.decode([hf.bos_token_id, think, word, end, word, tokenizer.eos_id, tokenizer.pad_id])
    assert text.startswith("<think>") and text.count("</think>") == 1
    assert text.endswith(str(hf.decode([word])).strip())
    assert not any(token in text for token in (tokenize.PAD, tokenize.BOS, tokenize.EOS))
