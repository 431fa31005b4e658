"""The record of a run of `attnops prove`, a JSON file that is written after each step and continues a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from attnops_testing.prove.step import Ending, Result, Step


@dataclasses.dataclass
class Record:
    """What ran on a machine.

    Attributes:
        machine: the machine and its versions, as of `describe_machine`.
        problems: what `attnops doctor` finds.
        steps: the steps of the run, in order.
        results: the results so far, by section and name.
        running: the sections and names of the steps that run.
        peers: why each peer is not measured here, by its name; empty if it is.
    """

    machine: dict[str, Any]
    problems: list[dict[str, str]]
    steps: list[Step]
    results: dict[tuple[str, str], Result] = dataclasses.field(default_factory=dict)
    running: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    peers: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Record:
        """The record in a file.

        Raises:
            ValueError: the file is not a record.
        """
        try:
            fields = json.loads(path.read_text())
            steps = [Step(**step) for step in fields["steps"]]
            results = {
                (row["section"], row["name"]): Result(**row["result"] | {"ending": Ending(row["result"]["ending"])})
                for row in fields["results"]
            }
            running = fields["running"] or []
            if running and isinstance(running[0], str):  # earlier versions wrote one step, or null
                running = [running]
            running = [(section, name) for section, name in running]
            return cls(fields["machine"], fields["problems"], steps, results, running, fields["peers"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a record of attnops prove: {error!r}; give another file") from None

    def write(self, path: Path) -> None:
        """Replace the file as a whole, so that it is complete at any time."""
        rows = [
            {"section": section, "name": name, "result": dataclasses.asdict(result)}
            for (section, name), result in self.results.items()
        ]
        fields = {
            "machine": self.machine, "problems": self.problems,
            "steps": [dataclasses.asdict(step) for step in self.steps], "results": rows, "running": self.running,
            "peers": self.peers,
        }  # fmt: skip
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(fields, indent=1) + "\n")
        part.replace(path)

    def resume(self, earlier: Record) -> int:
        """Take over the results of an earlier run; the number of them.

        Results of steps that this run does not have, such as those of other sections, are kept too. Steps that
        ran when the earlier run ended are crashes, and are not tried again.

        Raises:
            ValueError: the earlier run was on another machine, or with other versions.
        """
        if earlier.machine != self.machine:
            raise ValueError("the record is of another machine or of other versions: give another --report, or --fresh")
        mine = {(step.section, step.name) for step in self.steps}
        sections = {step.section for step in self.steps}
        known = {(step.section, step.name): step for step in earlier.steps}
        for key, step in known.items():
            follows = step.name.endswith(" alone") and step.section in sections  # it follows a crash
            if key not in mine and (key in earlier.results or follows):
                self.steps.append(step)
        for step in self.steps:
            key = step.section, step.name
            if key in earlier.results and known.get(key) == step:
                self.results[key] = earlier.results[key]
            elif key in earlier.running:
                self.results[key] = Result(Ending.CRASH, "the run, or the machine, ended during this step")
        return len(self.results)
