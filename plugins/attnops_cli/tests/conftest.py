"""What tests of commands share."""

from command_fixtures import core_alone, register, run, run_json

__all__ = ["core_alone", "register", "run", "run_json"]
