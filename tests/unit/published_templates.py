"""How published chat templates write conversations: a system message, a user's, an answer, and where one begins.

{} is what is said. They are as the publishers' own files write them without tools, collected from the templates that
LLaMA-Factory, ollama, llama.cpp and chujiezheng/chat_templates keep (November 2026).
"""

from typing import NamedTuple


class Published(NamedTuple):
    """A template; `system` is "" where a system message stands in the user's or is refused."""

    system: str
    user: str
    answer: str
    generation: str

    @property
    def jinja(self) -> str:
        """Return the template as a tokenizer has it."""
        parts = {"system": self.system or "{}", "user": self.user, "assistant": self.answer}
        branches = [
            f"{{% {'el' if number else ''}if m.role == '{role}' %}}{{{{ {_quoted(part)} }}}}"
            for number, (role, part) in enumerate(parts.items())
        ]
        generation = f"{{% if add_generation_prompt %}}{{{{ {_quoted(self.generation)} }}}}{{% endif %}}"
        return f"{{% for m in messages %}}{''.join(branches)}{{% endif %}}{{% endfor %}}{generation}"


def _quoted(part: str) -> str:
    """Return what writes a part, with a message's content for {}."""
    before, said, after = part.partition("{}")
    return " ~ ".join([repr(before), *(["m.content", repr(after)] if said else [])])


CHATML = Published(
    "<|im_start|>system\n{}<|im_end|>\n",
    "<|im_start|>user\n{}<|im_end|>\n",
    "<|im_start|>assistant\n{}<|im_end|>\n",
    "<|im_start|>assistant\n",
)
BY_BRACKETS = {  # each mark shows by itself what it is
    "chatml": CHATML,
    "llama 2": Published("", "<s>[INST] {} [/INST]", " {} </s>", ""),
    "llama 3": Published(
        "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llama 4": Published(
        "<|header_start|>system<|header_end|>\n\n{}<|eot|>",
        "<|header_start|>user<|header_end|>\n\n{}<|eot|>",
        "<|header_start|>assistant<|header_end|>\n\n{}<|eot|>",
        "<|header_start|>assistant<|header_end|>\n\n",
    ),
    "mistral small": Published("[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]", "[INST]{}[/INST]", "{}</s>", ""),
    "gemma": Published(
        "",
        "<start_of_turn>user\n{}<end_of_turn>\n",
        "<start_of_turn>model\n{}<end_of_turn>\n",
        "<start_of_turn>model\n",
    ),
    "gemma 4": Published(
        "<|turn>system\n{}<turn|>\n", "<|turn>user\n{}<turn|>\n", "<|turn>model\n{}<turn|>\n", "<|turn>model\n"
    ),
    "exaone": Published(
        "[|system|]{}[|endofturn|]\n", "[|user|]{}\n", "[|assistant|]{}[|endofturn|]\n", "[|assistant|]"
    ),
    "seed": Published(
        "<seed:bos>system\n{}<seed:eos>",
        "<seed:bos>user\n{}<seed:eos>",
        "<seed:bos>assistant\n{}<seed:eos>",
        "<seed:bos>assistant\n",
    ),
    "openchat": Published(
        "",
        "GPT4 Correct User: {}<|end_of_turn|>",
        "GPT4 Correct Assistant: {}<|end_of_turn|>",
        "GPT4 Correct Assistant:",
    ),
    "deepseek": Published("{}", "<｜User｜>{}", "<｜Assistant｜>{}<｜end▁of▁sentence｜>", "<｜Assistant｜>"),
    "deepseek, thinking off": Published(
        "{}", "<｜User｜>{}", "<｜Assistant｜></think>{}<｜end▁of▁sentence｜>", "<｜Assistant｜></think>"
    ),
    "hunyuan": Published(
        "{}<｜hy_place▁holder▁no▁3｜>", "<｜hy_User｜>{}", "<｜hy_Assistant｜>{}", "<｜hy_Assistant｜>"
    ),
    "phi 3": Published(
        "<|system|>\n{}<|end|>\n", "<|user|>\n{}<|end|>\n", "<|assistant|>\n{}<|end|>\n", "<|assistant|>\n"
    ),
    "dots": Published(
        "<|system|>{}<|endofsystem|>\n",
        "<|user|>{}<|endofuser|>",
        "<|assistant|>{}<|endofassistant|>",
        "<|assistant|>",
    ),
    "command": Published(
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>",
    ),
    "granite": Published(
        "<|start_of_role|>system<|end_of_role|>{}<|end_of_text|>\n",
        "<|start_of_role|>user<|end_of_role|>{}<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>{}<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    "kimi": Published(
        "<|im_system|>system<|im_middle|>{}<|im_end|>",
        "<|im_user|>user<|im_middle|>{}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>{}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>",
    ),
    "gpt-oss": Published(
        "<|start|>system<|message|>{}<|end|>",
        "<|start|>user<|message|>{}<|end|>",
        "<|start|>assistant<|channel|>final<|message|>{}<|end|>",
        "<|start|>assistant",
    ),
    "glm": Published("<|system|>\n{}", "<|user|>\n{}", "<|assistant|>\n{}", "<|assistant|>\n"),
    "bailing": Published(
        "<role>SYSTEM</role>{}", "<role>HUMAN</role>{}", "<role>ASSISTANT</role>{}", "<role>ASSISTANT</role>"
    ),
    "telechat": Published("<_system>{}", "<_user>{}", "<_bot>{}", "<_bot>"),
    "minimax text": Published(
        "<beginning_of_sentence>system ai_setting=assistant\n{}<end_of_sentence>\n",
        "<beginning_of_sentence>user name=user\n{}<end_of_sentence>\n",
        "<beginning_of_sentence>ai name=assistant\n{}<end_of_sentence>\n",
        "<beginning_of_sentence>ai name=assistant\n",
    ),
    "minimax": Published("]~!b[]~b]system\n{}[e~[\n", "]~b]user\n{}[e~[\n", "]~b]ai\n{}[e~[\n", "]~b]ai\n"),
    "nemotron": Published(
        "<SPECIAL_10>System\n{}\n", "<SPECIAL_11>User\n{}\n", "<SPECIAL_11>Assistant\n{}\n", "<SPECIAL_11>Assistant\n"
    ),
    "alfred": Published(
        "<start_system>{}<end_message>",
        "<start_user>{}<end_message>",
        "<start_assistant>{}<end_message>",
        "<start_assistant>",
    ),
    "codellama 70b": Published(
        "Source: system\n\n {} <step> ",
        "Source: user\n\n {} <step> ",
        "Source: assistant\nDestination: user\n\n {} <step> ",
        "Source: assistant\nDestination: user\n\n ",
    ),
}
BY_HEADINGS = {  # a text may have such words of its own
    "alpaca": Published("{}\n\n", "### Instruction:\n{}\n\n", "### Response:\n{}\n\n", "### Response:\n"),
    "starcoder 2": Published("{}\n\n", "### Instruction\n{}\n\n", "### Response\n{}\n\n", "### Response\n"),
    "magicoder": Published("{}\n\n", "@@ Instruction\n{}\n\n", "@@ Response\n{}\n\n", "@@ Response\n"),
    "solar": Published("### System:\n{}\n\n", "### User:\n{}\n\n", "### Assistant:\n{}\n\n", "### Assistant:\n"),
    "guanaco": Published("{}\n", "### Human: {}\n", "### Assistant: {}\n", "### Assistant:"),
    "vicuna": Published("{} ", "USER: {} ", "ASSISTANT: {}</s>", "ASSISTANT:"),
    "falcon": Published("{}\n", "User: {}\n", "Falcon: {}\n", "Falcon:"),
    "chatqa": Published("System: {}\n\n", "User: {}\n\n", "Assistant: {}\n\n", "Assistant:"),
}
PUBLISHED = BY_BRACKETS | BY_HEADINGS
