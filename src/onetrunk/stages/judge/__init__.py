"""The stage `onetrunk judge`: how well judges agree with people, and what they are biased by."""
