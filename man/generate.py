"""Writes mlxcel-server.1 from the settings table: `python man/generate.py`. A test checks that it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # of a checkout that is not installed

from mlxcel import __version__
from mlxcel.settings_table import GROUPS, TABLE, Setting
from mlxcel.usage import shown_default

PAGE = Path(__file__).parent / "mlxcel-server.1"

HEAD = r""".nh
.ad l
.SH NAME
mlxcel\-server \- language\-model server for MLX with a prompt\-prefix KV cache
.SH SYNOPSIS
.B mlxcel\-server
.RB { \-m
.IR PATH " | "
.B \-hf
.IR OWNER/NAME " | "
.BR \-\-demo }
.RI [ options ]
.SH DESCRIPTION
.B mlxcel\-server
loads a language model (a directory of MLX or Hugging Face files, or a GGUF file) and answers the OpenAI chat and
completion routes and llama\-server's native ones. Requests are decoded together in one batch. The KV of prompts and
answers is stored, and a later request that begins with the same tokens adopts it instead of computing it again; an
answer never depends on whether it did.
.PP
Command lines and environment files written for llama\-server start it unchanged: placement flags and features that
are not there yet are accepted, and the log names those that were given. Only what would silently change the answers
is refused; see
.BR COMPATIBILITY .
"""

ENVIRONMENT = r""".SH ENVIRONMENT
Most options can be set by a variable, which is named with the option. The command line wins over the environment; of
the variables of one option the first that is set wins. An option \-\-x / \-\-no\-x whose variable is LLAMA_ARG_X is
also switched off by the mere presence of LLAMA_ARG_NO_X, whatever its value.
.PP
For LLAMA_ARG_ variables of options without a value
.BR on ,
.BR enabled ,
.BR true " and " 1
are yes,
.BR off ,
.BR disabled ,
.BR false " and " 0
are no, in lower case only. The others take
.BR true ,
.BR 1 ,
.BR yes ,
.BR on
and
.BR false ,
.BR 0 ,
.BR no ,
.BR off
in any case. These variables have no option:
"""

TAIL = r""".SH FILES
.TP
.I ~/.cache/mlxcel/models/
The demo model.
.B MLXCEL_CACHE_DIR
moves it.
.TP
.IR /etc/llama.cpp/config.ini ", " ~/.config/llama.cpp/config.ini
Options as key = value lines, as llama.cpp's programs read them; below the environment.
.B XDG_CONFIG_HOME
moves the second one.
.SH EXIT STATUS
.TP
.B 0
A clean stop.
.TP
.B 1
It could not serve: no such model, an address in use, the engine failed, or a second signal. Worth another try by a
service manager.
.TP
.B 2
A bad flag or variable, which the message names. Trying again does not help.
.SH SIGNALS
.B SIGTERM
and
.B SIGINT
stop accepting, finish what runs for up to
.B \-\-shutdown\-timeout
seconds, and exit. New connections are refused meanwhile, and requests on open ones answered with 503. A second signal
exits at once.
.SH EXAMPLES
Try it out with a small model:
.PP
.nf
    mlxcel\-server \-\-demo
.fi
.PP
Serve a GGUF file to the local network, with a key and metrics:
.PP
.nf
    LLAMA_API_KEY=secret mlxcel\-server \-m model.gguf \-\-host 0.0.0.0 \-\-port 8080 \-\-metrics
.fi
.PP
The same from an environment file that llama\-server could read too, as the unit in contrib/systemd does:
.PP
.nf
    LLAMA_ARG_MODEL=/srv/models/model.gguf
    LLAMA_ARG_HOST=0.0.0.0
    LLAMA_ARG_ENDPOINT_METRICS=1
    LLAMA_ARG_CACHE_REUSE=256
.fi
.PP
Ask why a request found nothing in the prompt cache:
.PP
.nf
    curl localhost:8080/v1/cache/explain \-d @request.json
.fi
.SH SEE ALSO
README.md and docs/prompt\-cache.md of the project.
"""


def page() -> str:
    parts = [f'.TH MLXCEL\\-SERVER 1 "" "mlxcel {__version__}" "User Commands"\n', HEAD, ".SH OPTIONS\n"]
    for group, rows in GROUPS.items():
        working = [row for row in rows if row.effect == "works" and row.flags]
        if working:
            parts.append(f".SS {group}\n" + "".join(map(_option, working)))
    parts.append(ENVIRONMENT)
    parts += [
        f".TP\n.B {row.env[0]}\n{_text(_sentence(row.help))}\n"
        for row in TABLE
        if row.effect == "works" and not row.flags
    ]
    parts.append(".SH COMPATIBILITY\nAccepted for llama\\-server's sake, without effect here:\n" + _listing("accepted"))
    parts.append(".PP\nRefused, because ignoring them would change the answers:\n" + _listing("refused"))
    return "".join(parts) + TAIL


def _option(row: Setting) -> str:
    flags = ", ".join(f"\\fB{_text(flag)}\\fR" for flag in (*row.flags, *row.negative))
    value = f" \\fI{_text(row.metavar)}\\fR" if row.takes_value else ""
    default = f" Default: {_text(d)}." if (d := shown_default(row)) else ""
    env = f" Variable: {_text(' or '.join(row.env))}." if row.env else ""
    return f".TP\n{flags}{value}\n{_text(_sentence(row.help))}{default}{env}\n"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _listing(effect: str) -> str:
    return _text(", ".join((row.flags or row.env)[-1] for row in TABLE if row.effect == effect)) + ".\n"


def _text(text: str) -> str:
    """Plain text as roff: backslashes and dashes escaped, no line that begins like a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text.startswith((".", "'")) else text


if __name__ == "__main__":
    PAGE.write_text(page())
