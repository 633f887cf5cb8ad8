"""What is told of a template is what rendering shows, whatever its source looks like."""

import pytest

from mlxcel.prompt.capabilities import capabilities
from mlxcel.prompt.template import ChatTemplate

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN
TOOLS = "{{ tools | tojson }}" + PLAIN
CALLS = (
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
ONE_CALL = (
    "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one') }}{% endif %}{{ m.tool_calls[0].function.name }}{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}{{ m.content }}"
    "{% if preserve_thinking and m.reasoning_content %}{{ m.reasoning_content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "able"),
    [
        (PLAIN, {"string_content", "system_role"}),
        (NO_SYSTEM, {"string_content"}),
        (TOOLS, {"string_content", "system_role", "tools"}),
        (CALLS, {"string_content", "system_role", "tool_calls", "parallel_tool_calls", "object_arguments"}),
        (ONE_CALL, {"string_content", "system_role", "tool_calls"}),
        (PARTS, {"string_content", "system_role", "typed_content"}),
        (THINKING, {"string_content", "system_role", "preserve_reasoning"}),
        ("{{ raise_exception('never') }}", set()),
        ("the same whatever is asked, tools or tool_calls", set()),
    ],
)
def test_what_a_template_can_do(source, able):
    found = capabilities(ChatTemplate(source, {}))
    assert {name.removeprefix("supports_") for name, is_able in found.items() if is_able} == able
    assert len(found) == 8
