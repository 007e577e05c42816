"""The OpenAI-compatible HTTP server, in front of an engine process. Which modules do what, besides
the folders `anthropic`, `responses`, `parsing` (formats of calls and reasoning), `ui` (the page):

    begin and end            run, config, started, stats
    paths                    app, operation, rendering
    OpenAI endpoints         completions, chat, conversation
    before the application   gate, connections, cors
    a body, read             bodies, protocol, parts, unknown, messages, templates, forms,
                             parameters
    its way to the engine    service, encoder, tokenizing, submission, generation
    its answer               stream, blocks, echo, logprobs, errors, transfer
    figures                  metrics, vllm_metrics, tallies
    files of requests        batch
"""
