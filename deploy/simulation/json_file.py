"""Files of figures, as a pydantic model."""

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from deploy.config import describe
from rollout.errors import ConfigError

M = TypeVar("M", bound=BaseModel)


def read_json(path: Path, model: type[M]) -> M:
    """Raises ConfigError where it cannot be read or is not one."""
    try:
        return model.model_validate(json.loads(path.read_text()))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(error, model)}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
