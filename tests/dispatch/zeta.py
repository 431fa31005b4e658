"""What tests install as the module of a distribution, with more or less of it: an operation "zeta"."""

import sys

from attnops import OperationRegistry  # noqa: F401  # for what tests append
from attnops.operations.vanilla import VanillaAttention

sys.imported_by_test.append(__name__)


class Operation(VanillaAttention):
    api_version = 2

    @classmethod
    def get_impl_name(cls):
        return "zeta"
