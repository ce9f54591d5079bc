# frozen_string_literal: true

# ruby generate.rb HOST:PORT "a prompt" [MAX_TOKENS] [SEED] [CANCEL_AFTER]: streams the answer to standard output; a line of JSON about it
# goes to standard error. SEED of -1: whatever the server draws. The stubs are made from the protos (see README.md), with Debian's packages
# ruby-grpc, protobuf-compiler and protobuf-compiler-grpc, or the gems grpc and grpc-tools.

$LOAD_PATH.unshift(File.join(__dir__, "lib"))

require "json"
require "grpc"
require "pagecast/v1/generation_services_pb"

V1 = Pagecast::V1

target = ARGV[0] || "127.0.0.1:50051"
prompt = ARGV[1] || "Once upon a time"
max_tokens = Integer(ARGV[2] || 64)
seed = Integer(ARGV[3] || -1)
cancel_after = ARGV[4] && Integer(ARGV[4])

stub = V1::GenerationService::Stub.new(target, :this_channel_is_insecure)
spec = V1::GenerationSpec.new(prompt_text: prompt, stopping: V1::StoppingOptions.new(max_output_tokens: max_tokens))
spec.sampling = V1::SamplingOptions.new(seed: seed) if seed >= 0
call = stub.generate_stream(V1::GenerateStreamRequest.new(spec: spec), deadline: Time.now + 60, return_op: true)

seen = { requestId: "", events: [], tokens: [], finish: "", code: "OK", details: "" }
begin
  call.execute.each do |response|
    event = response.event
    seen[:events] << event.event.to_s
    case event.event
    when :accepted then seen[:requestId] = event.accepted.request_id
    when :sequence_finished then seen[:finish] = event.sequence_finished.reason.to_s
    when :tokens
      seen[:tokens].concat(event.tokens.token_ids.to_a)
      print event.tokens.text
      call.cancel if cancel_after && seen[:tokens].length >= cancel_after
    end
  end
rescue GRPC::BadStatus => e
  seen[:code] = GRPC::Core::StatusCodes.constants.find { |name| GRPC::Core::StatusCodes.const_get(name) == e.code }.to_s
  seen[:details] = e.details
end
warn JSON.generate(seen)
exit(seen[:code] == "OK" ? 0 : 1)
