// Talks to the server at argv[2] with the npm openai client and prints what it heard as one line of JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "secret", maxRetries: 0, timeout: 20_000 });
const messages = [{ role: "user", content: "Hello" }];
const limits = { temperature: 0, max_tokens: 16 };
const heard = { models: [], streamed: "", errors: [] };

for await (const model of client.models.list()) heard.models.push(model.id);

const chat = await client.chat.completions.create({ model: heard.models[0], messages, ...limits, n: 2, logprobs: true, top_logprobs: 1 });
heard.chat = chat.choices.map((choice) => choice.message.content);
heard.tokens = chat.choices[0].logprobs.content.length;
heard.cached = chat.usage.prompt_tokens_details.cached_tokens;

const stream = await client.chat.completions.create({
  model: heard.models[0], messages, ...limits, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  heard.streamed += chunk.choices[0]?.delta?.content ?? "";
  heard.usage = chunk.usage?.completion_tokens ?? heard.usage;
}

const helper = client.chat.completions.stream({ model: heard.models[0], messages, ...limits });
heard.helper = await helper.finalContent();

const completion = await client.completions.create({ model: heard.models[0], prompt: "a", ...limits, echo: true });
heard.completion = completion.choices[0].text;

for (const attempt of [
  () => client.chat.completions.create({ model: "gpt-4", messages }),
  () => client.chat.completions.create({ model: heard.models[0], messages, temperature: -1 }),
  () => new OpenAI({ baseURL: client.baseURL, apiKey: "wrong", maxRetries: 0 }).models.list(),
]) {
  try {
    await attempt();
  } catch (error) {
    heard.errors.push([error.constructor.name, error.param ?? null]);
  }
}
console.log(JSON.stringify(heard));
