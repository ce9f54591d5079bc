// A channel to Pagecast: the protos, TLS, a bearer token, and the service config that the server publishes.
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import type { ProtoGrpcType } from "./types/generation.js";
import type { GenerationServiceClient } from "./types/pagecast/v1/GenerationService.js";

const root = fileURLToPath(new URL("../../../", import.meta.url));
export const loading = { keepCase: false, longs: Number, enums: String, defaults: true, oneofs: true };

export interface Access {
  target: string;
  ca?: string; // PEM file of the authority to trust; absent: plaintext
  token?: string;
}

export function credentials(access: Access): grpc.ChannelCredentials {
  return access.ca ? grpc.credentials.createSsl(readFileSync(access.ca)) : grpc.credentials.createInsecure();
}

export function metadata(access: Access): grpc.Metadata {
  const found = new grpc.Metadata();
  if (access.token) found.set("authorization", `Bearer ${access.token}`);
  return found;
}

export function connect(access: Access): GenerationServiceClient {
  const definition = loadSync("pagecast/v1/generation.proto", { ...loading, includeDirs: [`${root}protos`] });
  const api = grpc.loadPackageDefinition(definition) as unknown as ProtoGrpcType;
  const advice = JSON.parse(readFileSync(`${root}client/pagecast/service_config.json`, "utf8"));
  delete advice.healthCheckConfig; // one server: ask it whatever it says of itself
  return new api.pagecast.v1.GenerationService(access.target, credentials(access), {
    "grpc.service_config": JSON.stringify(advice),
    "grpc.keepalive_time_ms": 20_000,
    "grpc.keepalive_timeout_ms": 10_000,
  });
}
