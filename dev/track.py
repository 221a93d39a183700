#!/usr/bin/env python3
"""track.py LOG... --tensorboard DIR | --wandb PROJECT -- sends the log.jsonl of runs to TensorBoard or Weights & Biases.

    python3 dev/track.py out/*/log.jsonl --tensorboard tb --follow        then: tensorboard --logdir tb
    WANDB_MODE=offline python3 dev/track.py out/mine/log.jsonl --wandb llama

A run has the name of its folder. Each step is sent once, also over several starts of this program: FOLDER/track-TARGET.json,
beside the log, records the lines that were sent. With --follow new lines are sent as they come. If a resumed run cuts its log
back, its steps replace the steps sent before: TensorBoard hides the old ones, Weights & Biases gets a second run.
Needs `tensorboard` or `wandb`; the trainers need neither.
"""
import argparse
import datetime
import html
import json
import os
import time
import zlib

from errors import fail, run_log  # first: see there


class Tail:
    """Reads a log that grows, and that a resumed run may cut back. `sent` holds the checksum of each line that was sent."""

    def __init__(self, log, memory):
        self.log, self.memory, self.sent = log, memory, []
        if os.path.exists(memory):
            try:
                with open(memory, encoding="utf-8") as f:
                    self.sent = json.load(f)
            except ValueError:
                fail(f"{memory}: is damaged", "remove it: the run is then sent once more")

    def news(self):
        """Returns (step to set back to or None, new events)."""
        with open(self.log, "rb") as f:
            lines = f.read().split(b"\n")[:-1]  # the last line may still be written
        sums = [zlib.crc32(line) for line in lines]
        same = next((i for i, (a, b) in enumerate(zip(sums, self.sent)) if a != b), min(len(sums), len(self.sent)))
        back = None
        if same < len(self.sent):
            if same == len(lines):  # only cut back so far: the line that replaces the cut ones will come
                return None, []
            back = max((event.get("step", 0) for event in self.events(lines[:same], 1)), default=0)
        events = self.events(lines[same:], same + 1)
        self.sent = sums
        return back, events

    def events(self, lines, number):
        """Returns the events of lines, the first of which is line `number` of the log."""
        events = []
        for number, line in enumerate(lines, number):
            try:
                events.append(json.loads(line))
            except ValueError:
                events.append(None)
            if not isinstance(events[-1], dict) or "event" not in events[-1]:
                fail(f"{self.log}:{number}: is no event of a run's log")
        return events

    def keep(self):
        with open(self.memory + ".tmp", "w", encoding="utf-8") as f:
            json.dump(self.sent, f)
        os.replace(self.memory + ".tmp", self.memory)


def scalars(event):
    """Returns {name: number} of an event: its numbers, named as TensorBoard groups them."""
    group = {"step": "train", "val": "val", "task": f"task/{event.get('file', '')}"}.get(event["event"])
    return {f"{group}/{k}": v for k, v in event.items() if group and k != "step" and isinstance(v, (int, float))}


class TensorBoard:
    """Writes event files. An event's time is the end of its step."""

    def __init__(self, folder, name):
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self.event, self.summary, self.tensor = event_pb2, summary_pb2, tensor_pb2
        self.writer = EventFileWriter(os.path.join(folder, name))

    def set_back(self, step):
        start = self.event.SessionLog(status=self.event.SessionLog.START)
        self.writer.add_event(self.event.Event(wall_time=time.time(), step=step + 1, session_log=start))

    def text(self, tag, text):
        plugin = self.summary.SummaryMetadata(plugin_data=dict(plugin_name="text"))
        tensor = self.tensor.TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        return self.summary.Summary.Value(tag=tag, metadata=plugin, tensor=tensor)

    def send(self, event, when):
        values = [self.summary.Summary.Value(tag=k, simple_value=v) for k, v in scalars(event).items()]
        if event["event"] == "sample":
            values.append(self.text("sample", event["text"]))
        if event["event"] == "config":
            values.append(self.text("config", "    " + json.dumps(event, indent=2).replace("\n", "\n    ")))
        if values:
            summary = self.summary.Summary(value=values)
            self.writer.add_event(self.event.Event(wall_time=when, step=event.get("step", 0), summary=summary))

    def close(self):
        self.writer.close()


class WeightsAndBiases:
    """One run; after a set-back, a new one. train/seconds and train/tokens are axes to plot over."""

    def __init__(self, project, name):
        import wandb
        self.wandb, self.project, self.name = wandb, project, name
        self.run, self.turn = wandb.init(project=project, name=name), 1

    def set_back(self, step):
        self.run.finish()
        self.turn += 1
        self.run = self.wandb.init(project=self.project, name=f"{self.name}-{self.turn}", notes=f"set back to step {step}")

    def send(self, event, when):
        values = {**scalars(event), "_timestamp": when}
        if event["event"] == "config":
            self.run.config.update({k: event[k] for k in ("options", "model", "precision", "machine")})
        elif event["event"] == "sample":
            self.run.log({"sample": self.wandb.Html(f"<pre>{html.escape(event['text'])}</pre>")}, step=event["step"])
        elif len(values) > 1:
            self.run.log(values, step=event["step"])

    def close(self):
        self.run.finish()


class Run:
    """A log and its target."""

    def __init__(self, log, target, open_target):
        folder = os.path.dirname(os.path.abspath(log))
        self.name, self.open_target, self.target = os.path.basename(folder), open_target, None
        self.tail = Tail(log, os.path.join(folder, f"track-{target}.json"))
        self.began = 0.0  # when the process began that wrote the events

    def follow(self):
        """Sends what is new. Returns the number of events."""
        back, events = self.tail.news()
        if not events:
            return 0
        self.target = self.target or self.open_target(self.name)
        if back is not None:
            self.target.set_back(back)
        for event in events:
            if "time" in event:
                when = datetime.datetime.strptime(event["time"], "%Y-%m-%dT%H:%M:%SZ")
                self.began = when.replace(tzinfo=datetime.timezone.utc).timestamp()
            self.target.send(event, (self.began or time.time()) + event.get("seconds", 0))
        return len(events)

    def close(self):
        if self.target:
            self.target.close()
            self.tail.keep()

    def is_empty(self):
        """Returns whether the log has no event at all, neither now nor in earlier calls."""
        return not self.tail.sent


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("logs", nargs="+", metavar="LOG", help="log.jsonl of a run, or its folder")
    p.add_argument("--tensorboard", metavar="DIR", help="write event files below this folder")
    p.add_argument("--wandb", metavar="PROJECT", help="send to this project; WANDB_MODE=offline keeps it on the disk")
    p.add_argument("--follow", action="store_true", help="continue until Ctrl-C")
    a = p.parse_args()
    if bool(a.tensorboard) == bool(a.wandb):
        p.error("give --tensorboard DIR or --wandb PROJECT")
    logs = [run_log(log) for log in a.logs]
    for log in logs:
        if not os.path.isfile(log):
            fail(f"{log}: no such file", "give the log.jsonl of a run")
    if a.tensorboard:
        runs = [Run(log, "tensorboard", lambda name: TensorBoard(a.tensorboard, name)) for log in logs]
    else:
        runs = [Run(log, "wandb", lambda name: WeightsAndBiases(a.wandb, name)) for log in logs]
    try:
        while True:
            count = sum(run.follow() for run in runs)
            if count:
                print(f"sent {count} events", flush=True)
            if not a.follow:
                for log, run in zip(logs, runs):
                    if run.is_empty():
                        fail(f"{log}: has no event of a run")
                break
            time.sleep(2)
    except KeyboardInterrupt:
        print()
    finally:
        for run in runs:
            run.close()


if __name__ == "__main__":
    main()
