"""The OpenAI-compatible HTTP server in front of an engine process. Besides the folders `anthropic`,
`responses` and `parsing` (formats of tool calls and reasoning), its modules are:

    begin and end            run, config, loading, stats
    paths                    app, operation, rendering, tokens
    OpenAI endpoints         completions, chat, conversation
    before the application   connections, gate, callers
    a body, read             bodies, fields, protocol, parts, tools, unknown
    its meaning              messages, custom, templates, forms, parameters
    the way to the engine    service, generation, observers
    its answer               answers, stream, blocks, logprobs, errors, transfer
    figures                  metrics, vllm_metrics
    files of requests        batch
"""
