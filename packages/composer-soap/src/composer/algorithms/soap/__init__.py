"""SOAP: AdamW in the eigenbasis of each hidden matrix's gradients."""

from composer.algorithms.soap.soap import SOAP as SOAP
from composer.algorithms.soap.soap import build_soap as build_soap

__all__ = ["SOAP", "build_soap"]
