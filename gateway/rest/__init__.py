"""The gateway's REST API, compatible with OpenAI's."""
