"""The contract of all algorithms, for SOAP."""

from composer.algorithms.soap import SOAP
from composer.testing import AlgorithmContract


class TestSOAP(AlgorithmContract):
    microbatch_reason = "rounding decides the basis of directions without gradients"

    def make(self) -> SOAP:
        return SOAP(lr=0.003)


class TestSOAPWithOptions(TestSOAP):
    def make(self) -> SOAP:
        return SOAP(lr=0.003, weight_decay=0.1, betas=(0.9, 0.99), shampoo_beta=0.9, precondition_frequency=2)
