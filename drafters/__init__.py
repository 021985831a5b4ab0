"""Drafters: they propose tokens for the nodes of draft trees and never decide what is accepted."""
