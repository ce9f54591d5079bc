// node dist/services.js HOST:PORT: what the server offers, as its reflection says, under both names that reflection has.
import { createRequire } from "node:module";
import { dirname } from "node:path";
import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { loading } from "./connect.js";

const target = process.argv[2] ?? "127.0.0.1:50051";
const protos = `${dirname(createRequire(import.meta.url).resolve("@grpc/reflection/package.json"))}/build/proto/grpc/reflection`;

async function services(version: string): Promise<string[]> {
  const api: any = grpc.loadPackageDefinition(loadSync(`${protos}/${version}/reflection.proto`, loading));
  const client = new api.grpc.reflection[version].ServerReflection(target, grpc.credentials.createInsecure());
  const call = client.ServerReflectionInfo({ deadline: Date.now() + 60_000 });
  call.write({ listServices: "" });
  call.end();
  let names: string[] = [];
  for await (const answer of call) names = answer.listServicesResponse.service.map((service: { name: string }) => service.name);
  client.close();
  return names.sort();
}

console.log(JSON.stringify({ v1: await services("v1"), v1alpha: await services("v1alpha") }));
