"""The two links by one name: what daemons import.  producer_link.py and trainer_link.py hold them, wire.py the socket."""
from protocol.events import Cursor, LinkDown, LinkUp, Refused, ReportArrived
from protocol.offers import CheckpointReady
from protocol.producer_link import ProducerLink
from protocol.rules import Timing
from protocol.trainer_link import TrainerLink

__all__ = ["CheckpointReady", "Cursor", "LinkDown", "LinkUp", "ProducerLink", "Refused", "ReportArrived", "Timing", "TrainerLink"]
