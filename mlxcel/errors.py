"""Every failure that a person can meet, as one small tree.

Each class carries the HTTP status and the llama-server `type` that it is answered with; one middleware
(api/app.py) renders them. Nothing here knows HTTP, MLX or the store. `ConfigError` and `StartError` never
reach a client: `__main__` prints their one line and exits with `exit_code`.
"""

from __future__ import annotations


class ServerError(Exception):
    """A failure with a status. `param` names the request field at fault; `extra` joins the error object."""

    status = 500
    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, **extra: int | str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.extra = extra

    def body(self) -> dict[str, object]:
        """The JSON object of llama-server: {"error": {"code", "message", "type", ...}}."""
        error: dict[str, object] = {"code": self.status, "message": self.message, "type": self.type}
        if self.param is not None:
            error["param"] = self.param
        return {"error": error | self.extra}


class InvalidRequest(ServerError):
    status = 400
    type = "invalid_request_error"


class ContextExceeded(InvalidRequest):
    type = "exceed_context_size_error"

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            f"request ({n_prompt_tokens} tokens) exceeds the available context size ({n_ctx} tokens), "
            "try increasing it",
            n_prompt_tokens=n_prompt_tokens,
            n_ctx=n_ctx,
        )


class Unauthorized(ServerError):
    status = 401
    type = "authentication_error"


class FeatureDisabled(ServerError):
    """Left off for safety. Its error object has no code, as in llama-server."""

    status = 403
    type = "feature_disabled"

    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.type}}


class NotFound(ServerError):
    status = 404
    type = "not_found_error"


class BodyTooLarge(ServerError):
    status = 413
    type = "invalid_request_error"


class NotSupported(ServerError):
    status = 501
    type = "not_supported_error"


class Unavailable(ServerError):
    """Try again later; `retry_after` (whole seconds) becomes the Retry-After header."""

    status = 503
    type = "unavailable_error"

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ConfigError(Exception):
    """A flag or a variable that cannot be used; the message names it."""

    exit_code = 2


class StartError(Exception):
    """What keeps the server from starting; the message is one line."""

    exit_code = 1


class ModelError(StartError):
    """A model that cannot be found, read or served."""
