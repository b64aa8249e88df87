"""Chat templates in the form of those that model families publish, and a real tokenizer with one."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from infra.models.demo import build_demo_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMS = (
    "<bos>{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception(m.role ~ ' is not supported') }}{% endif %}"
    "<|im_start|>{{ m.role }}: {{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
NO_END = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
QWEN2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (  # the last turn of the model has its reasoning, earlier ones are without theirs
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "<bos>{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MIXTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %} [INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
OLMOE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content }}{{ eos_token }}"
    "{% if not loop.last %}\n{% endif %}{% else %}<|{{ m.role }}|>\n{{ m.content }}\n{% endif %}"
    "{% if loop.last and add_generation_prompt %}<|assistant|>\n{% endif %}{% endfor %}"
)
PUBLISHED = {  # template, end of a turn, end-of-sequence token of the tokenizer
    "qwen2": (QWEN2, "<|im_end|>", "<|endoftext|>"),
    "qwen2_instruct": (QWEN2, "<|im_end|>", "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>", "<|im_end|>"),
    "qwen3_base": (QWEN3, "<|im_end|>", "<|endoftext|>"),
    "llama3": (LLAMA3, "<|eot_id|>", "<|end_of_text|>"),
    "llama3_instruct": (LLAMA3, "<|eot_id|>", "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>", "</s>"),
    "mixtral": (MIXTRAL, "</s>", "</s>"),
    "olmoe": (OLMOE, "|||IP_ADDRESS|||", "|||IP_ADDRESS|||"),
    "gemma": (GEMMA, "<end_of_turn>", "<eos>"),
}
"""In the form of the templates that these families publish, by what a model's own turn ends with."""
QWEN25_TOOLS = (  # line breaks in expressions: the one after a block is not part of the text
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}{% endif %}{% for m in messages %}{% if m.role == 'user' or m.role == 'system' %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}{% elif m.role == 'assistant' %}<|im_start|>assistant"
    "{% if m.content %}{{ '\n' ~ m.content }}{% endif %}{% for call in m.tool_calls or () %}"
    '{{ \'\n<tool_call>\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}"
    "{{ '}\n</tool_call>' }}{% endfor %}<|im_end|>\n{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA31_TOOLS = (
    "<|begin_of_text|>{% for m in messages %}{% if m.role == 'tool' %}"
    "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
    "{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n<|python_tag|>"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>'
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if tools and m.role == 'user' and loop.first %}{{ tools | tojson }}\n\n{% endif %}"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_NINE = "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
MISTRAL_TOOLS = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] ["
    "{% for call in m.tool_calls %}{% if call.id | length != 9 %}" + _NINE + "{% endif %}"
    '{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{% endfor %}]</s>'
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}" + _NINE + '{% endif %}[TOOL_RESULTS] {"content": {{ m.content }}, '
    '"call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}{% endfor %}'
)
WITH_TOOLS = {  # template, end of a turn, a call in the model's own words
    "qwen2.5": (QWEN25_TOOLS, "<|im_end|>", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
    "hermes": (QWEN25_TOOLS, "<|im_end|>", 'I add.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
    "llama3.1": (LLAMA31_TOOLS, "<|eot_id|>", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
    "mistral": (MISTRAL_TOOLS, "</s>", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'),
}
"""As `PUBLISHED`, of templates with tools; Hermes and Mistral mark calls with special tokens."""
MARKS = {"hermes": ("<tool_call>", "</tool_call>"), "mistral": ("[TOOL_CALLS]",), "llama3.1": ("<|python_tag|>",)}
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<bos>", "<eos>", "<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>"),
    "|||IP_ADDRESS|||",  # OLMoE's end of sequence
)


def tokenizer(template: str | None, end: str = "<|im_end|>", marks: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """A real tokenizer with `template`, whose end of sequence is `end`; `marks` are special tokens, too."""
    made = build_demo_tokenizer(())
    made.add_tokens([AddedToken(text, special=True, normalized=False) for text in (*SPECIAL, *marks)])
    made.eos_token = end
    made.chat_template = template
    return made
