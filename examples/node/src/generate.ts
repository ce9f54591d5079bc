// node dist/generate.js HOST:PORT "a prompt" [--max-tokens N] [--seed N] [--timeout SECONDS] [--ca FILE] [--token TOKEN] [--cancel-after N]
// Streams the answer to standard output; a line of JSON about it goes to standard error. Ctrl-C ends the request on the server.
import { parseArgs } from "node:util";
import * as grpc from "@grpc/grpc-js";
import { connect, metadata } from "./connect.js";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    "max-tokens": { type: "string", default: "64" },
    seed: { type: "string" },
    timeout: { type: "string", default: "60" },
    "cancel-after": { type: "string" },
    ca: { type: "string" },
    token: { type: "string" },
  },
});
const [target = "127.0.0.1:50051", prompt = "Once upon a time"] = positionals;
const access = { target, ca: values.ca, token: values.token };
const client = connect(access);

const call = client.GenerateStream(
  {
    spec: {
      promptText: prompt,
      stopping: { maxOutputTokens: Number(values["max-tokens"]) },
      sampling: values.seed ? { seed: values.seed } : undefined,
    },
  },
  metadata(access),
  { deadline: Date.now() + 1000 * Number(values.timeout) },
);
process.once("SIGINT", () => call.cancel());

const seen = { requestId: "", events: [] as string[], tokens: [] as number[], finish: "", code: "", details: "", load: false };
call.on("data", ({ event }) => {
  if (!event?.event) return;
  seen.events.push(event.event);
  if (event.accepted) seen.requestId = event.accepted.requestId;
  if (event.sequenceFinished) seen.finish = String(event.sequenceFinished.reason);
  if (event.tokens) {
    seen.tokens.push(...event.tokens.tokenIds);
    process.stdout.write(event.tokens.text);
    if (values["cancel-after"] && seen.tokens.length >= Number(values["cancel-after"])) call.cancel();
  }
});
call.on("error", () => {}); // its status comes below
call.on("status", (status) => {
  seen.code = grpc.status[status.code] ?? String(status.code);
  seen.details = status.details;
  seen.load = status.metadata.get("endpoint-load-metrics-bin").length > 0; // an ORCA report
  console.error(JSON.stringify(seen));
  process.exitCode = status.code === grpc.status.OK ? 0 : 1;
  client.close();
});
