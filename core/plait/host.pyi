"""What `plait.host` exports: the only list of it, for type checkers and for `host.py`."""

from plait.check.check import check as check
from plait.check.checked import Checked as Checked
from plait.checkpoint.load import load as load
from plait.checkpoint.load import load_latest as load_latest
from plait.checkpoint.save import Saver as Saver
from plait.checkpoint.store import Store as Store
from plait.commands.arguments import Parser as Parser
from plait.commands.arguments import whole as whole
from plait.compose.compose import compose as compose
from plait.parallel.apply import Applied as Applied
from plait.parallel.simulated import simulated as simulated
from plait.parallel.step import Stepped as Stepped
from plait.records import metrics as metrics
from plait.records import text as text
from plait.records.ledger import Job as Job
from plait.records.ledger import Ledger as Ledger
from plait.records.run_folder import Outcome as Outcome
from plait.records.run_folder import RunFolder as RunFolder
from plait.records.run_folder import is_live as is_live
from plait.records.sinks import numbers as numbers
from plait.strategies import plugins as plugins
from plait.system.disk import replace as replace
from plait.system.disk import writing as writing
from plait.train.optimizer import learning_rate as learning_rate
from plait.train.optimizer import make_optimizer as make_optimizer
