import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;
import java.net.http.HttpTimeoutException;
import java.time.Duration;
import java.util.ArrayList;

/** Java's client, as ADDRESS KEY VERSION say: one line for each of a chat, the same once more on the same connection, a
 * stream, a chat without a key, and a long one that runs out of time. VERSION is "default" or "HTTP_1_1". */
public class ChatClient {
    public static void main(String[] given) throws Exception {
        var builder = HttpClient.newBuilder();
        if (!given[2].equals("default")) builder.version(HttpClient.Version.valueOf(given[2]));
        var client = builder.build();
        var chat = "{\"messages\": [{\"role\": \"user\", \"content\": \"12+34=\"}], \"seed\": 3, %s}";
        var brief = chat.formatted("\"max_tokens\": 20");
        for (int i = 0; i < 2; i++) {
            var answer = client.send(request(given, brief).build(), BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.body());
        }
        var lines = new ArrayList<String>();
        client.send(request(given, chat.formatted("\"max_tokens\": 20, \"stream\": true")).build(), BodyHandlers.ofLines())
            .body().filter(line -> !line.isEmpty()).forEach(lines::add);
        System.out.println(lines.size() + " " + lines.get(lines.size() - 1));
        var strange = request(given, brief).setHeader("Authorization", "Bearer wrong").build();
        System.out.println(client.send(strange, BodyHandlers.ofString()).statusCode());
        var longer = chat.formatted("\"max_tokens\": 3000, \"ignore_eos\": true, \"n\": 64");
        try {
            client.send(request(given, longer).timeout(Duration.ofMillis(500)).build(), BodyHandlers.ofString());
        } catch (HttpTimeoutException error) {
            System.out.println("timed out");
        }
        System.exit(0);
    }

    private static HttpRequest.Builder request(String[] given, String body) {
        return HttpRequest.newBuilder(URI.create(given[0] + "/chat/completions"))
            .header("Authorization", "Bearer " + given[1])
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body));
    }
}
