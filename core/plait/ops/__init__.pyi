"""What `plait.ops` exports: the only list of it, for type checkers and for `__init__.py`."""

from plait.ops.added_loss import with_loss as with_loss
from plait.ops.attention import CausalAttention as CausalAttention
from plait.ops.attention import DocumentMask as DocumentMask
from plait.ops.attention import attend as attend
from plait.ops.flops import Flops as Flops
from plait.ops.grouped import counts_for_products as counts_for_products
from plait.ops.grouped import grouped_linear as grouped_linear
from plait.ops.hugging_face import HuggingFace as HuggingFace
from plait.ops.hugging_face import Rule as Rule
from plait.ops.init import Constant as Constant
from plait.ops.init import Normal as Normal
from plait.ops.init import TruncNormal as TruncNormal
from plait.ops.init import ZeroRow as ZeroRow
from plait.ops.init import ones as ones
from plait.ops.init import zeros as zeros
from plait.ops.loss import cross_entropy_sum as cross_entropy_sum
from plait.ops.loss import loss_context as loss_context
from plait.ops.routing import Copies as Copies
from plait.ops.routing import chosen as chosen
