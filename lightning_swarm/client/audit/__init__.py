"""The trainer's part in audits: sends work to auditors, and checks the results that it receives itself."""
