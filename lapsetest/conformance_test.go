package lapsetest_test

// One suite, two servers: what holds on a real RocketMQ 5.5.0 must hold here, or a
// test that passes on this package proves nothing. Every case has a topic and a
// group of its own, and all run at once: they wait far more than they compute.

import (
	"context"
	"crypto/md5" //nolint:gosec // the protocol's body digest
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	golang "github.com/apache/rocketmq-clients/golang/v5"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/lapse-orders/lapse/internal/rmq/admin"
	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/lapsetest"
)

// server is what the suite runs against.
type server struct {
	endpoint  string
	precision time.Duration
	// lag is how much later than asked a message may show again.
	lag time.Duration
	// tardy is how late a timed message may be on an idle server.
	tardy time.Duration
	// swallowed is how long, at least, a message is away that an abandoned poll has taken.
	swallowed time.Duration
	// apart says that the proxy is a process beside the broker (cluster mode), as in containers: it sees itself what is not there.
	apart bool
	// topic and group make one under a name of its own.
	topic func(t *testing.T, typ lapsetest.TopicType) string
	group func(t *testing.T, retries int) string
}

func embedded(t *testing.T) *server {
	t.Helper()
	b := lapsetest.Start(t, lapsetest.WithGhostPolls())
	name := func() string { return fmt.Sprintf("c%d", rawCount.Add(1)) }
	return &server{
		endpoint:  b.Endpoint(),
		precision: 100 * time.Millisecond,
		lag:       3 * time.Second, // none; this is what a loaded machine may add
		tardy:     3 * time.Second,
		swallowed: time.Second,
		topic: func(_ *testing.T, typ lapsetest.TopicType) string {
			n := name()
			b.CreateTopic(n, typ, 8)
			return n
		},
		group: func(_ *testing.T, retries int) string {
			n := name()
			b.CreateGroup(n, retries)
			return n
		},
	}
}

func TestConformanceEmbedded(t *testing.T) {
	t.Parallel()
	conform(t, embedded, append(conformCases(), officialClient))
}

func TestConformanceReal(t *testing.T) {
	t.Parallel()
	stacktest.Shared(t) // skips or fails here, not once for each case
	cases := conformCases()
	if !raceDetector {
		// The client applies the backoff policy that the real server sends without a lock
		// (producer_options.go:155-159), which the embedded one spares it.
		cases = append(cases, officialClient)
	}
	conform(t, func(t *testing.T) *server {
		t.Helper()
		b := stacktest.Shared(t)
		return &server{
			endpoint:  b.Endpoints,
			precision: 100 * time.Millisecond, // what scripts/stack ships
			lag:       5 * time.Second,        // 2 to 3 s, on a machine with nothing else to do
			tardy:     3 * time.Second,
			apart:     os.Getenv("LAPSE_TEST_NAMESRV_ADMIN") != "", // servers in containers
			swallowed: 0,                                           // some 3 s as a rule; at once where the proxy has heard in time that the client is gone
			topic: func(t *testing.T, typ lapsetest.TopicType) string {
				t.Helper()
				return b.NewTopic(t, admin.TopicType(typ))
			},
			group: func(t *testing.T, retries int) string {
				t.Helper()
				return b.NewGroup(t, retries)
			},
		}
	}, cases)
}

// suite is one case's way to its server.
type suite struct {
	*raw
	s     *server
	topic string
	group string
}

// setup makes a DELAY topic, a group, and a client whose settings are known.
func setup(t *testing.T, s *server, retries int) *suite {
	t.Helper()
	u := &suite{raw: dialRaw(t, s.endpoint), s: s, topic: s.topic(t, lapsetest.Delay), group: s.group(t, retries)}
	u.mustSettle(consumerSettings(u.group, u.topic))
	return u
}

type conformCase struct {
	name string
	run  func(*testing.T, *server)
}

// conformCases are the cases for both servers.
func conformCases() []conformCase {
	return []conformCase{
		{"RouteShowsTheTypeAndTheWayIn", conformRoute},
		{"SettingsAreAnsweredForBothKinds", conformSettings},
		{"UnknownSettingsAreNoticed", conformForgotten},
		{"SendLimitsHaveTheirCodes", conformSendLimits},
		{"TypesMustMatch", conformTypes},
		{"ReceiveLimitsHaveTheirCodes", conformReceiveLimits},
		{"EmptyReceiveLastsThePollingTime", conformEmptyPoll},
		{"TimedMessageIsNeverEarly", conformTimer},
		{"PastDeadlineIsDeliveredAtOnce", conformPast},
		{"MessageComesBackAsItWasSent", conformContent},
		{"BatchOfMoreThan32CountsAs32", conformBatch},
		{"FreshGroupGetsWhatWasSentBefore", conformFreshGroup},
		{"UnackedMessageComesAgain", conformRedelivery},
		{"AckTwiceIsOK", conformAckTwice},
		{"MalformedHandleIsRefused", conformGarbageHandle},
		{"ExpiredHandleIsRefused", conformExpiredHandle},
		{"ReplacedHandleAcksNothing", conformReplacedHandle},
		{"OldHandleMakesTheMessageComeOnceMore", conformForkedHandle},
		{"DeadLetterAfterRetriesPlusOne", conformDeadLetter},
		{"ReaderOfDeadLettersNeedsMoreRetries", conformDeadLetterReader},
		{"OtherTagsAreSkippedForGood", conformTags},
		{"RecallIsForbiddenUnlessSwitchedOn", conformRecall},
		{"AbandonedReceiveTakesAMessageForAWhile", conformGhost},
	}
}

func conform(t *testing.T, open func(*testing.T) *server, cases []conformCase) {
	t.Helper()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.run(t, open(t))
		})
	}
}

func wantCode(t *testing.T, what string, got, want v2.Code) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %d %v, want %d", what, int32(got), got, int32(want))
	}
}

func conformRoute(t *testing.T, s *server) {
	u := setup(t, s, 1)
	r := u.route(u.topic)
	wantCode(t, "route", r.GetStatus().GetCode(), v2.Code_OK)
	if n := len(r.GetMessageQueues()); n != 8 {
		t.Fatalf("%d queues, want 8", n)
	}
	for i, q := range r.GetMessageQueues() {
		if int(q.GetId()) != i || q.GetPermission() != v2.Permission_READ_WRITE || q.GetBroker().GetName() == "" ||
			len(q.GetBroker().GetEndpoints().GetAddresses()) == 0 ||
			len(q.GetAcceptMessageTypes()) != 1 || q.GetAcceptMessageTypes()[0] != v2.MessageType_DELAY {
			t.Errorf("queue %d is %v", i, q)
		}
	}
	wantCode(t, "unknown topic", u.route("no-such-topic-"+u.topic).GetStatus().GetCode(), v2.Code_TOPIC_NOT_FOUND)
	wantCode(t, "illegal topic", u.route("a b").GetStatus().GetCode(), v2.Code_ILLEGAL_TOPIC)
}

func conformSettings(t *testing.T, s *server) {
	u := setup(t, s, 3)
	got := dialRaw(t, s.endpoint).mustSettle(producerSettings(u.topic)).GetPublishing()
	if got.GetMaxBodySize() != 4<<20 || !got.GetValidateMessageType() {
		t.Errorf("producer's settings: %v", got)
	}
	again := u.mustSettle(consumerSettings(u.group, u.topic))
	if sub := again.GetSubscription(); sub == nil || sub.GetFifo() || sub.GetReceiveBatchSize() != 32 || sub.GetLongPollingTimeout().AsDuration() != 20*time.Second {
		t.Errorf("consumer's settings: %v", sub)
	}
	if p := again.GetBackoffPolicy(); p.GetMaxAttempts() != 4 || p.GetStrategy() == nil {
		t.Errorf("backoff policy of a group with 3 retries: %v", p)
	}
	wantCode(t, "heartbeat", u.heartbeat(u.group), v2.Code_OK)
	wantCode(t, "heartbeat for an unknown group", u.heartbeat("no-such-group-"+u.group), v2.Code_ILLEGAL_CONSUMER_GROUP)
	for _, c := range []struct {
		name     string
		settings *v2.Settings
	}{
		{"an unknown group", consumerSettings("no-such-group-"+u.group, u.topic)},
		{"neither publishing nor subscription", &v2.Settings{ClientType: v2.ClientType_PRODUCER.Enum()}},
	} {
		r := dialRaw(t, s.endpoint)
		if _, err := r.settle(c.settings); status.Code(err) != codes.InvalidArgument {
			t.Errorf("settings with %s: %v, want InvalidArgument", c.name, err)
		}
		wantCode(t, "heartbeat after settings with "+c.name, r.heartbeat(u.group), v2.Code_UNRECOGNIZED_CLIENT_TYPE)
	}
	anonymous := dialRaw(t, s.endpoint)
	anonymous.id = ""
	if _, err := anonymous.settle(producerSettings(u.topic)); !errors.Is(err, io.EOF) {
		t.Errorf("settings without a client id: %v, want the stream's end", err)
	}
}

func conformForgotten(t *testing.T, s *server) {
	u := setup(t, s, 1)
	stranger := dialRaw(t, s.endpoint)
	wantCode(t, "heartbeat of a stranger", stranger.heartbeat(u.group), v2.Code_UNRECOGNIZED_CLIENT_TYPE)
	wantCode(t, "receive of a stranger", stranger.receive(u.group, u.topic, 1, 10*time.Second, 10*time.Second).code, v2.Code_INTERNAL_SERVER_ERROR)
	out, err := stranger.api.NotifyClientTermination(stranger.ctx(requestTimeout), &v2.NotifyClientTerminationRequest{Group: res(u.group)})
	if err != nil {
		t.Fatalf("notify termination: %v", err)
	}
	wantCode(t, "termination of a stranger", out.GetStatus().GetCode(), v2.Code_UNRECOGNIZED_CLIENT_TYPE)
}

func conformSendLimits(t *testing.T, s *server) {
	u := setup(t, s, 1)
	soon := func() time.Time { return time.Now().Add(time.Hour) }
	with := func(change func(*v2.Message)) *v2.Message {
		m := newMessage(u.topic, "body", soon())
		change(m)
		return m
	}
	keys := func(n int) []string {
		out := make([]string, n)
		for i := range out {
			out[i] = fmt.Sprintf("%019d", i)
		}
		return out
	}
	properties := func(n int) map[string]string {
		out := make(map[string]string)
		for i := range n {
			out[fmt.Sprintf("p%d", i)] = "v"
		}
		return out
	}
	for _, c := range []struct {
		name string
		m    *v2.Message
		want v2.Code
	}{
		{"23 h 59 min ahead", newMessage(u.topic, "b", time.Now().Add(24*time.Hour-time.Minute)), v2.Code_OK},
		{"25 h ahead", newMessage(u.topic, "b", time.Now().Add(25*time.Hour)), v2.Code_ILLEGAL_DELIVERY_TIME},
		{"empty body", newMessage(u.topic, "", soon()), v2.Code_MESSAGE_BODY_EMPTY},
		{"body above 4 MiB", newMessage(u.topic, strings.Repeat("x", 4<<20+1), soon()), v2.Code_MESSAGE_BODY_TOO_LARGE},
		{"128 properties", with(func(m *v2.Message) { m.UserProperties = properties(128) }), v2.Code_OK},
		{"129 properties", with(func(m *v2.Message) { m.UserProperties = properties(129) }), v2.Code_MESSAGE_PROPERTIES_TOO_LARGE},
		{"850 keys", with(func(m *v2.Message) { m.SystemProperties.Keys = keys(850) }), v2.Code_OK},
		{"870 keys", with(func(m *v2.Message) { m.SystemProperties.Keys = keys(870) }), v2.Code_MESSAGE_PROPERTIES_TOO_LARGE},
		{"property of 16 KiB", with(func(m *v2.Message) { m.UserProperties = map[string]string{"k": strings.Repeat("v", 16<<10)} }), v2.Code_MESSAGE_PROPERTIES_TOO_LARGE},
		{"reserved property", with(func(m *v2.Message) { m.UserProperties = map[string]string{"TIMER_DELIVER_MS": "1"} }), v2.Code_ILLEGAL_MESSAGE_PROPERTY_KEY},
		{"control character in a property", with(func(m *v2.Message) { m.UserProperties = map[string]string{"k": "a\x01b"} }), v2.Code_ILLEGAL_MESSAGE_PROPERTY_KEY},
		{"control character in a key", with(func(m *v2.Message) { m.SystemProperties.Keys = []string{"a\x01b"} }), v2.Code_ILLEGAL_MESSAGE_KEY},
		{"blank key", with(func(m *v2.Message) { m.SystemProperties.Keys = []string{" "} }), v2.Code_ILLEGAL_MESSAGE_KEY},
		{"blank tag", with(func(m *v2.Message) { s := " "; m.SystemProperties.Tag = &s }), v2.Code_ILLEGAL_MESSAGE_TAG},
		{"tag with a bar", with(func(m *v2.Message) { s := "a|b"; m.SystemProperties.Tag = &s }), v2.Code_ILLEGAL_MESSAGE_TAG},
		{"no message id", with(func(m *v2.Message) { m.SystemProperties.MessageId = "" }), v2.Code_ILLEGAL_MESSAGE_ID},
		{"unknown topic", newMessage("no-such-topic-"+u.topic, "b", soon()), v2.Code_MESSAGE_PROPERTY_CONFLICT_WITH_TYPE},
		{"illegal topic", newMessage("a b", "b", soon()), v2.Code_ILLEGAL_TOPIC},
	} {
		wantCode(t, c.name, u.send(c.m).GetStatus().GetCode(), c.want)
	}
	wantCode(t, "two timed messages in one request",
		u.send(newMessage(u.topic, "a", soon()), newMessage(u.topic, "b", soon())).GetStatus().GetCode(), v2.Code_INTERNAL_SERVER_ERROR)
	wantCode(t, "no message in a request", u.send().GetStatus().GetCode(), v2.Code_MESSAGE_CORRUPTED)
	if h := u.mustSend(newMessage(u.topic, "b", soon())).GetEntries()[0].GetRecallHandle(); h == "" {
		t.Error("a timed message has no recall handle")
	}
	if h := u.mustSend(newMessage(u.topic, "b", time.Now().Add(-time.Second))).GetEntries()[0].GetRecallHandle(); h != "" {
		t.Errorf("a message due in the past has the recall handle %q", h)
	}
}

func conformTypes(t *testing.T, s *server) {
	u := setup(t, s, 1)
	normal := s.topic(t, lapsetest.Normal)
	wantCode(t, "ordinary message on a DELAY topic", u.send(newMessage(u.topic, "b", time.Time{})).GetStatus().GetCode(), v2.Code_MESSAGE_PROPERTY_CONFLICT_WITH_TYPE)
	wantCode(t, "timed message on a NORMAL topic", u.send(newMessage(normal, "b", time.Now().Add(time.Minute))).GetStatus().GetCode(), v2.Code_MESSAGE_PROPERTY_CONFLICT_WITH_TYPE)
	wantCode(t, "ordinary message on a NORMAL topic", u.send(newMessage(normal, "b", time.Time{})).GetStatus().GetCode(), v2.Code_OK)
}

func conformReceiveLimits(t *testing.T, s *server) {
	u := setup(t, s, 1)
	noTopic, noGroup := v2.Code_INTERNAL_SERVER_ERROR, v2.Code_INTERNAL_SERVER_ERROR
	if s.apart {
		noTopic, noGroup = v2.Code_TOPIC_NOT_FOUND, v2.Code_CONSUMER_GROUP_NOT_FOUND
	}
	for _, c := range []struct {
		name         string
		group, topic string
		invisible    time.Duration
		deadline     time.Duration
		want         v2.Code
	}{
		{"invisible below 10 s", u.group, u.topic, 10*time.Second - time.Millisecond, 10 * time.Second, v2.Code_ILLEGAL_INVISIBLE_TIME},
		{"invisible above 12 h", u.group, u.topic, 12*time.Hour + time.Millisecond, 10 * time.Second, v2.Code_ILLEGAL_INVISIBLE_TIME},
		{"less than 5 s of deadline", u.group, u.topic, 10 * time.Second, 4 * time.Second, v2.Code_ILLEGAL_POLLING_TIME},
		{"unknown topic", u.group, "no-such-topic-" + u.topic, 10 * time.Second, 10 * time.Second, noTopic},
		{"illegal topic", u.group, "a b", 10 * time.Second, 10 * time.Second, v2.Code_ILLEGAL_TOPIC},
		{"unknown group", "no-such-group-" + u.group, u.topic, 10 * time.Second, 10 * time.Second, noGroup},
		{"illegal group", "a b", u.topic, 10 * time.Second, 10 * time.Second, v2.Code_ILLEGAL_CONSUMER_GROUP},
	} {
		got := u.receive(c.group, c.topic, 1, c.invisible, c.deadline)
		wantCode(t, c.name, got.code, c.want)
		if got.statuses != 1 || len(got.messages) != 0 {
			t.Errorf("%s: %d statuses and %d messages, want 1 and 0", c.name, got.statuses, len(got.messages))
		}
	}
	got, err := u.tryReceive(u.sign(t.Context()), u.group, u.topic, 1, 10*time.Second)
	if err != nil {
		t.Fatalf("receive without a deadline: %v", err)
	}
	wantCode(t, "no deadline", got.code, v2.Code_INTERNAL_SERVER_ERROR)
}

func conformEmptyPoll(t *testing.T, s *server) {
	u := setup(t, s, 1)
	start := time.Now()
	got := u.receive(u.group, u.topic, 1, 10*time.Second, 8*time.Second)
	took := time.Since(start)
	wantCode(t, "empty receive", got.code, v2.Code_MESSAGE_NOT_FOUND)
	// 8 s of deadline less half of the 3 s that the settings call the request timeout.
	if took < 6*time.Second || took > 7900*time.Millisecond {
		t.Errorf("an empty receive with a deadline of 8 s took %v, want about 6.5 s", took)
	}
}

func conformTimer(t *testing.T, s *server) {
	u := setup(t, s, 1)
	tick := time.Now().Add(2 * time.Second).Truncate(s.precision)
	dues := map[string]time.Time{
		"on a tick":         tick,
		"1 ms after a tick": tick.Add(time.Millisecond),
		"1 ms before one":   tick.Add(s.precision - time.Millisecond),
		"in the middle":     tick.Add(s.precision / 2),
	}
	for name, due := range dues {
		u.mustSend(newMessage(u.topic, name, due))
	}
	for range dues {
		m := u.next(u.group, u.topic, 10*time.Second, 20*time.Second)
		now := time.Now()
		name := string(m.GetBody())
		due := dues[name]
		if now.Before(due) {
			t.Errorf("%s: %v early", name, due.Sub(now))
		}
		if rounded := due.Add(s.precision); now.After(rounded.Add(s.tardy)) {
			t.Errorf("%s: %v late", name, now.Sub(due))
		}
		wantCode(t, "ack", u.ack(u.group, u.topic, handleOf(m)), v2.Code_OK)
	}
}

func conformPast(t *testing.T, s *server) {
	u := setup(t, s, 1)
	due := time.Now().Add(-time.Hour).Truncate(time.Millisecond)
	start := time.Now()
	u.mustSend(newMessage(u.topic, "b", due))
	m := u.next(u.group, u.topic, 10*time.Second, 10*time.Second)
	if took := time.Since(start); took > 2*time.Second {
		t.Errorf("a message due in the past took %v", took)
	}
	if at := m.GetSystemProperties().GetDeliveryTimestamp(); at == nil || !at.AsTime().Equal(due) {
		t.Errorf("delivery timestamp %v, want %v", at, due)
	}
}

func conformContent(t *testing.T, s *server) {
	u := setup(t, s, 1)
	in := newMessage(u.topic, "the body", time.Now().Add(300*time.Millisecond).Truncate(time.Millisecond))
	tag := "a-tag"
	in.SystemProperties.Keys = []string{"k1", "k2"}
	in.SystemProperties.Tag = &tag
	in.UserProperties = map[string]string{"traceparent": "00-ab"}
	sent := u.mustSend(in)
	if got := sent.GetEntries()[0]; got.GetMessageId() != idOf(in) || got.GetStatus().GetCode() != v2.Code_OK {
		t.Errorf("entry of the send: %v", got)
	}
	m := u.next(u.group, u.topic, 20*time.Second, 10*time.Second)
	sys := m.GetSystemProperties()
	sum := md5.Sum(in.GetBody()) //nolint:gosec // the protocol's body digest
	switch {
	case string(m.GetBody()) != "the body", m.GetTopic().GetName() != u.topic,
		idOf(m) != idOf(in), sys.GetTag() != tag, m.GetUserProperties()["traceparent"] != "00-ab",
		len(sys.GetKeys()) != 2, sys.GetKeys()[0] != "k1", sys.GetKeys()[1] != "k2":
		t.Errorf("received %v, sent %v", m, in)
	case sys.GetBodyDigest().GetType() != v2.DigestType_MD5,
		sys.GetBodyDigest().GetChecksum() != strings.ToUpper(hex.EncodeToString(sum[:])):
		t.Errorf("digest %v", sys.GetBodyDigest())
	case sys.GetBodyEncoding() != v2.Encoding_IDENTITY, sys.GetDeliveryAttempt() != 1,
		!sys.GetBornTimestamp().AsTime().Truncate(time.Millisecond).Equal(in.GetSystemProperties().GetBornTimestamp().AsTime().Truncate(time.Millisecond)),
		!sys.GetDeliveryTimestamp().AsTime().Equal(in.GetSystemProperties().GetDeliveryTimestamp().AsTime()),
		sys.GetReceiptHandle() == "", sys.GetStoreTimestamp() == nil, sys.QueueOffset == nil,
		sys.GetMessageType() != v2.MessageType_DELAY, sys.GetBornHost() != "test", sys.GetInvisibleDuration() != nil:
		t.Errorf("system properties %v", sys)
	}
}

func conformBatch(t *testing.T, s *server) {
	u := setup(t, s, 1)
	const n = 80
	for i := range n {
		u.mustSend(newMessage(u.topic, fmt.Sprint(i), time.Now().Add(-time.Second)))
	}
	seen, largest := make(map[string]bool), 0
	for limit := time.Now().Add(20 * time.Second); len(seen) < n && time.Now().Before(limit); {
		got := u.receive(u.group, u.topic, 100, 30*time.Second, 10*time.Second)
		largest = max(largest, len(got.messages))
		for _, m := range got.messages {
			seen[string(m.GetBody())] = true
		}
	}
	if len(seen) != n || largest > 32 {
		t.Errorf("received %d of %d, at most %d at once, want at most 32", len(seen), n, largest)
	}
}

func conformFreshGroup(t *testing.T, s *server) {
	u := setup(t, s, 1)
	const n = 20
	for i := range n {
		u.mustSend(newMessage(u.topic, fmt.Sprint(i), time.Now().Add(-time.Second)))
	}
	late := s.group(t, 1)
	c := dialRaw(t, s.endpoint)
	c.mustSettle(consumerSettings(late, u.topic))
	seen := make(map[string]bool)
	for len(seen) < n {
		m := c.next(late, u.topic, 30*time.Second, 10*time.Second)
		seen[string(m.GetBody())] = true
	}
}

func conformRedelivery(t *testing.T, s *server) {
	u := setup(t, s, 5)
	due := time.Now().Add(200 * time.Millisecond).Truncate(time.Millisecond)
	u.mustSend(newMessage(u.topic, "b", due))
	first := u.next(u.group, u.topic, 10*time.Second, 10*time.Second)
	taken := time.Now() // some moments after the server took it
	second := u.next(u.group, u.topic, 10*time.Second, 20*time.Second)
	hidden := time.Since(taken)
	if hidden < 9*time.Second || hidden > 10*time.Second+s.lag {
		t.Errorf("hidden for %v, want 10 s and at most %v more", hidden, s.lag)
	}
	if attemptOf(first) != 1 || attemptOf(second) != 2 || idOf(first) != idOf(second) || handleOf(first) == handleOf(second) {
		t.Errorf("attempts %d and %d, ids %s and %s, handles %s and %s", attemptOf(first), attemptOf(second), idOf(first), idOf(second), handleOf(first), handleOf(second))
	}
	if at := second.GetSystemProperties().GetDeliveryTimestamp(); at == nil || !at.AsTime().Equal(due) {
		t.Errorf("delivery timestamp after redelivery %v, want %v", at, due)
	}
	wantCode(t, "ack with the first handle", u.ack(u.group, u.topic, handleOf(first)), v2.Code_INVALID_RECEIPT_HANDLE)
	wantCode(t, "ack with the second handle", u.ack(u.group, u.topic, handleOf(second)), v2.Code_OK)
}

func conformAckTwice(t *testing.T, s *server) {
	u := setup(t, s, 5)
	u.mustSend(newMessage(u.topic, "b", time.Now()))
	m := u.next(u.group, u.topic, 10*time.Second, 10*time.Second)
	wantCode(t, "ack", u.ack(u.group, u.topic, handleOf(m)), v2.Code_OK)
	wantCode(t, "second ack", u.ack(u.group, u.topic, handleOf(m)), v2.Code_OK)
	for limit := time.Now().Add(14 * time.Second); time.Now().Before(limit); {
		if got := u.receive(u.group, u.topic, 1, 10*time.Second, 10*time.Second); len(got.messages) > 0 {
			t.Fatalf("an acknowledged message came again: %v", got.messages)
		}
	}
}

func conformGarbageHandle(t *testing.T, s *server) {
	u := setup(t, s, 5)
	wantCode(t, "ack", u.ack(u.group, u.topic, "garbage"), v2.Code_INTERNAL_SERVER_ERROR)
	code, _ := u.hide(u.group, u.topic, "garbage", time.Minute)
	wantCode(t, "change invisible duration", code, v2.Code_INTERNAL_SERVER_ERROR)
	u.mustSend(newMessage(u.topic, "b", time.Now()))
	m := u.next(u.group, u.topic, 10*time.Second, 10*time.Second)
	wantCode(t, "ack for an unknown topic", u.ack(u.group, "no-such-topic-"+u.topic, handleOf(m)), v2.Code_INTERNAL_SERVER_ERROR)
	wantCode(t, "ack for an illegal topic", u.ack(u.group, "a b", handleOf(m)), v2.Code_ILLEGAL_TOPIC)
	wantCode(t, "ack for an illegal group", u.ack("a b", u.topic, handleOf(m)), v2.Code_ILLEGAL_CONSUMER_GROUP)
	code, _ = u.hide(u.group, "no-such-topic-"+u.topic, handleOf(m), time.Minute)
	wantCode(t, "change invisible duration for an unknown topic", code, v2.Code_INTERNAL_SERVER_ERROR)
}

func conformExpiredHandle(t *testing.T, s *server) {
	u := setup(t, s, 5)
	u.mustSend(newMessage(u.topic, "b", time.Now()))
	m := u.next(u.group, u.topic, 10*time.Second, 10*time.Second)
	hidden := time.Now()
	code, short := u.hide(u.group, u.topic, handleOf(m), time.Second)
	wantCode(t, "change invisible duration to 1 s", code, v2.Code_OK)
	if short == "" || short == handleOf(m) {
		t.Errorf("the handle %q became %q, want a new one", handleOf(m), short)
	}
	again := u.next(u.group, u.topic, 10*time.Second, 20*time.Second)
	if d := time.Since(hidden); d < time.Second || d > time.Second+s.lag {
		t.Errorf("hidden for %v, want 1 s and at most %v more", d, s.lag)
	}
	if attemptOf(again) != 2 || idOf(again) != idOf(m) {
		t.Errorf("came again as attempt %d of %s, want 2 of %s", attemptOf(again), idOf(again), idOf(m))
	}
	wantCode(t, "ack with an expired handle", u.ack(u.group, u.topic, short), v2.Code_INVALID_RECEIPT_HANDLE)
	code, _ = u.hide(u.group, u.topic, short, time.Minute)
	wantCode(t, "change invisible duration with an expired handle", code, v2.Code_INVALID_RECEIPT_HANDLE)
	code, _ = u.hide(u.group, u.topic, handleOf(again), 12*time.Hour+time.Second)
	wantCode(t, "change invisible duration to more than 12 h", code, v2.Code_ILLEGAL_INVISIBLE_TIME)
	wantCode(t, "ack with the newest handle", u.ack(u.group, u.topic, handleOf(again)), v2.Code_OK)
}

func conformReplacedHandle(t *testing.T, s *server) {
	u := setup(t, s, 5)
	u.mustSend(newMessage(u.topic, "b", time.Now()))
	m := u.next(u.group, u.topic, 30*time.Second, 10*time.Second)
	code, _ := u.hide(u.group, u.topic, handleOf(m), 2*time.Second)
	wantCode(t, "change invisible duration", code, v2.Code_OK)
	wantCode(t, "ack with the replaced handle", u.ack(u.group, u.topic, handleOf(m)), v2.Code_OK)
	again := u.next(u.group, u.topic, 10*time.Second, 20*time.Second)
	if idOf(again) != idOf(m) || attemptOf(again) != 2 {
		t.Errorf("came again as attempt %d of %s, want 2 of %s", attemptOf(again), idOf(again), idOf(m))
	}
	wantCode(t, "ack with the newest handle", u.ack(u.group, u.topic, handleOf(again)), v2.Code_OK)
}

func conformDeadLetter(t *testing.T, s *server) {
	u := setup(t, s, 1)
	in := newMessage(u.topic, "dead", time.Now())
	in.SystemProperties.Keys = []string{"order-1"}
	u.mustSend(in)
	for attempt := int32(1); attempt <= 2; attempt++ {
		m := u.next(u.group, u.topic, 10*time.Second, 20*time.Second)
		if attemptOf(m) != attempt {
			t.Fatalf("attempt %d, want %d", attemptOf(m), attempt)
		}
		if code, _ := u.hide(u.group, u.topic, handleOf(m), time.Second); code != v2.Code_OK {
			t.Fatalf("change invisible duration: %v", code)
		}
	}
	dlq := "%DLQ%" + u.group
	reader := s.group(t, 16)
	u.awaitRoute(dlq, func() { // a Receive moves it
		got := u.receive(u.group, u.topic, 1, 10*time.Second, 6*time.Second)
		if len(got.messages) > 0 {
			t.Fatalf("a third delivery of a group with one retry: %v", got.messages)
		}
		wantCode(t, "receive that finds dead messages only", got.code, v2.Code_MESSAGE_NOT_FOUND)
	})
	if n := len(u.route(dlq).GetMessageQueues()); n != 1 {
		t.Errorf("the dead-letter topic has %d queues, want 1", n)
	}
	c := dialRaw(t, s.endpoint)
	c.mustSettle(consumerSettings(reader, dlq))
	m := c.next(reader, dlq, 10*time.Second, 20*time.Second)
	if string(m.GetBody()) != "dead" || len(m.GetSystemProperties().GetKeys()) != 1 || m.GetSystemProperties().GetKeys()[0] != "order-1" {
		t.Errorf("dead letter %v", m)
	}
	if idOf(m) != idOf(in) || attemptOf(m) != 4 || m.GetSystemProperties().GetDeliveryTimestamp() == nil {
		t.Errorf("dead letter has id %s, attempt %d and %v; want %s, 4 and its delivery timestamp", idOf(m), attemptOf(m), m.GetSystemProperties().GetDeliveryTimestamp(), idOf(in))
	}
}

// A dead letter brings the attempts of the group it died in along. A reader with as
// many retries passes it on to dead letters of its own and never sees it: who watches
// the dead letters of a group needs two retries more than that group.
func conformDeadLetterReader(t *testing.T, s *server) {
	u := setup(t, s, 1)
	u.mustSend(newMessage(u.topic, "dead", time.Now()))
	for range 2 {
		m := u.next(u.group, u.topic, 10*time.Second, 20*time.Second)
		if code, _ := u.hide(u.group, u.topic, handleOf(m), time.Second); code != v2.Code_OK {
			t.Fatalf("change invisible duration: %v", code)
		}
	}
	dlq := "%DLQ%" + u.group
	u.awaitRoute(dlq, func() { u.receive(u.group, u.topic, 1, 10*time.Second, 6*time.Second) })
	blind, seeing := s.group(t, 2), s.group(t, 3)
	c := dialRaw(t, s.endpoint)
	c.mustSettle(consumerSettings(seeing, dlq))
	if m := c.next(seeing, dlq, 30*time.Second, 20*time.Second); string(m.GetBody()) != "dead" {
		t.Errorf("dead letter %v", m)
	}
	c = dialRaw(t, s.endpoint)
	c.mustSettle(consumerSettings(blind, dlq))
	c.awaitRoute("%DLQ%"+blind, func() {
		if got := c.receive(blind, dlq, 1, 30*time.Second, 6*time.Second); len(got.messages) > 0 {
			t.Fatalf("a reader with one retry more than the dead group saw %v", got.messages)
		}
	})
}

// awaitRoute calls step until the topic is there.
func (r *raw) awaitRoute(topic string, step func()) {
	r.t.Helper()
	for limit := time.Now().Add(30 * time.Second); ; {
		step()
		if r.route(topic).GetStatus().GetCode() == v2.Code_OK {
			return
		}
		if time.Now().After(limit) {
			r.t.Fatalf("no topic %s within 30 s", topic)
		}
	}
}

func conformForkedHandle(t *testing.T, s *server) {
	u := setup(t, s, 16)
	in := newMessage(u.topic, "b", time.Now())
	u.mustSend(in)
	m := u.next(u.group, u.topic, 30*time.Second, 10*time.Second)
	code, first := u.hide(u.group, u.topic, handleOf(m), time.Second)
	wantCode(t, "change invisible duration", code, v2.Code_OK)
	code, second := u.hide(u.group, u.topic, handleOf(m), 2*time.Second)
	wantCode(t, "change invisible duration with the replaced handle", code, v2.Code_OK)
	if second == "" || second == first {
		t.Errorf("handles %q and %q", first, second)
	}
	for range 2 {
		again := u.next(u.group, u.topic, 30*time.Second, 20*time.Second)
		if idOf(again) != idOf(in) || attemptOf(again) != 2 {
			t.Errorf("came again as attempt %d of %s, want 2 of %s", attemptOf(again), idOf(again), idOf(in))
		}
		wantCode(t, "ack", u.ack(u.group, u.topic, handleOf(again)), v2.Code_OK)
		m = again
	}
	code, _ = u.hide(u.group, u.topic, handleOf(m), time.Second)
	wantCode(t, "change invisible duration after the ack", code, v2.Code_OK)
	again := u.next(u.group, u.topic, 10*time.Second, 20*time.Second)
	if idOf(again) != idOf(in) || attemptOf(again) != 3 {
		t.Errorf("came again as attempt %d of %s, want 3 of %s", attemptOf(again), idOf(again), idOf(in))
	}
}

func conformTags(t *testing.T, s *server) {
	u := setup(t, s, 5)
	for _, tag := range []string{"a", "b", ""} {
		m := newMessage(u.topic, "tag "+tag, time.Now())
		if tag != "" {
			m.SystemProperties.Tag = &tag
		}
		u.mustSend(m)
	}
	var seen []string
	for limit := time.Now().Add(10 * time.Second); len(seen) == 0 && time.Now().Before(limit); {
		got, err := u.tryReceiveTag(u.ctx(10*time.Second), u.group, u.topic, 32, 30*time.Second, "x || b")
		if err != nil {
			t.Fatalf("receive: %v", err)
		}
		for _, m := range got.messages {
			seen = append(seen, string(m.GetBody()))
		}
	}
	if len(seen) != 1 || seen[0] != "tag b" {
		t.Errorf("a filter for tag b received %q", seen)
	}
	if got := u.receive(u.group, u.topic, 32, 10*time.Second, 7*time.Second); len(got.messages) > 0 {
		t.Errorf("the others came back for a filter of all: %v", got.messages)
	}
}

func conformRecall(t *testing.T, s *server) {
	u := setup(t, s, 5)
	handle := u.mustSend(newMessage(u.topic, "b", time.Now().Add(time.Second))).GetEntries()[0].GetRecallHandle()
	out, err := u.api.RecallMessage(u.ctx(requestTimeout), &v2.RecallMessageRequest{Topic: res(u.topic), RecallHandle: handle})
	if err != nil {
		t.Fatalf("recall: %v", err)
	}
	wantCode(t, "recall", out.GetStatus().GetCode(), v2.Code_INTERNAL_SERVER_ERROR)
	u.next(u.group, u.topic, 10*time.Second, 10*time.Second)
}

// A killed consumer's open polls live on at the proxy, and may take a message along for a while.
func conformGhost(t *testing.T, s *server) {
	u := setup(t, s, 5)
	ghost := dialRaw(t, s.endpoint)
	ghost.mustSettle(consumerSettings(u.group, u.topic))
	ctx, cancel := context.WithTimeout(ghost.sign(t.Context()), 20*time.Second)
	defer cancel()
	stream, err := ghost.api.ReceiveMessage(ctx, receiveRequest(u.group, u.topic, 1))
	if err != nil {
		t.Fatalf("receive: %v", err)
	}
	// Nothing tells that its poll has begun; the five seconds of an empty one do.
	u.receive(s.group(t, 1), u.topic, 1, 10*time.Second, 6*time.Second)
	cancel()
	if _, err := stream.Recv(); status.Code(err) != codes.Canceled {
		t.Fatalf("the abandoned receive: %v", err)
	}
	sent := time.Now()
	u.mustSend(newMessage(u.topic, "b", time.Now()))
	m := u.next(u.group, u.topic, 10*time.Second, 20*time.Second)
	took := time.Since(sent)
	switch least := s.swallowed; attemptOf(m) {
	case 2: // the message overtook the news that the client has gone, and was given to it
		least = 10 * time.Second
		fallthrough
	case 1:
		if took < least || took > least+s.lag {
			t.Errorf("attempt %d came after %v, want %v and at most %v more", attemptOf(m), took, least, s.lag)
		}
	default:
		t.Errorf("attempt %d, want 1", attemptOf(m))
	}
}

var officialClient = conformCase{"OfficialClientDoesTheRound", conformOfficialClient}

func conformOfficialClient(t *testing.T, s *server) {
	topic, group := s.topic(t, lapsetest.Delay), s.group(t, 5)
	p := startProducer(t, s.endpoint, topic)
	c := startConsumer(t, s.endpoint, group, topic)
	due := time.Now().Add(1500 * time.Millisecond).Truncate(time.Millisecond)
	m := &golang.Message{Topic: topic, Body: []byte("body")}
	m.SetKeys("1", "2")
	m.AddProperty("traceparent", "00-aa")
	m.SetDelayTimestamp(due)
	receipts, err := p.Send(t.Context(), m)
	if err != nil {
		t.Fatalf("send: %v", err)
	}
	if len(receipts) != 1 || receipts[0].MessageID == "" || receipts[0].RecallHandle == "" {
		t.Fatalf("receipts %+v: want one with message id and recall handle", receipts)
	}
	got, err := c.Receive(within(t, 20*time.Second), 32, 10*time.Second)
	if err != nil {
		t.Fatalf("receive: %v", err)
	}
	if early := time.Until(due); early > 0 {
		t.Errorf("the message came %v early", early)
	}
	if len(got) != 1 {
		t.Fatalf("received %d messages, want 1", len(got))
	}
	v := got[0]
	if v.GetMessageId() != receipts[0].MessageID || string(v.GetBody()) != "body" || len(v.GetKeys()) != 2 ||
		v.GetProperties()["traceparent"] != "00-aa" || v.GetDeliveryAttempt() != 1 || !v.GetDeliveryTimestamp().Equal(due) {
		t.Errorf("received %+v", v)
	}
	before := v.GetReceiptHandle()
	if err := c.ChangeInvisibleDuration(v, time.Minute); err != nil {
		t.Fatalf("change invisible duration: %v", err)
	}
	if after := v.GetReceiptHandle(); after == "" || after == before {
		t.Errorf("the handle %q became %q", before, after)
	}
	if err := c.Ack(t.Context(), v); err != nil {
		t.Fatalf("ack: %v", err)
	}
	late := &golang.Message{Topic: topic, Body: []byte("x")}
	late.SetDelayTimestamp(time.Now().Add(25 * time.Hour))
	_, err = p.Send(t.Context(), late)
	var refused *golang.ErrRpcStatus
	if !errors.As(err, &refused) || refused.GetCode() != int32(v2.Code_ILLEGAL_DELIVERY_TIME) {
		t.Errorf("send 25 h ahead: %v, want code 40012", err)
	}
}
