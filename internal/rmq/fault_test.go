package rmq

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/lapse-orders/lapse/lapsetest"
)

func timed(topic, body string) Message {
	return Message{Topic: topic, Body: []byte(body), DeliverAt: time.Now()}
}

func TestRestartedProxyIsUsedAgainWithinSeconds(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p, c := b.producer(t), b.consumer(t)
	for round := range 3 {
		start := time.Now()
		if err := b.Restart(); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Inject(b.topic, []byte("x"), time.Now()); err != nil {
			t.Fatal(err)
		}
		d := receiveOne(t, c, 5*time.Second)
		received := time.Since(start)
		if err := c.Ack(t.Context(), d); err != nil {
			t.Fatal(err)
		}
		awaitReady(t, 5*time.Second, p.Ready)
		awaitReady(t, 5*time.Second, c.Ready)
		if _, err := p.Send(t.Context(), timed(b.topic, "y")); err != nil {
			t.Fatal(err)
		}
		if err := c.Ack(t.Context(), receiveOne(t, c, 5*time.Second)); err != nil {
			t.Fatal(err)
		}
		t.Logf("round %d: received %s after the restart", round, received.Round(time.Millisecond))
	}
}

func TestServerThatIsAwayForLongIsUsedAgainWithinSeconds(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p, c := b.producer(t), b.consumer(t)
	b.Stop()
	eventually(t, 5*time.Second, "Ready names the lost connection", func() bool {
		return errors.Is(p.Ready(), ErrNotReady) && errors.Is(c.Ready(), ErrNotReady) && strings.Contains(c.Ready().Error(), b.Endpoint())
	})
	eventually(t, 20*time.Second, "five sends fail", func() bool {
		_, err := p.Send(t.Context(), timed(b.topic, "x"))
		return err != nil && IsUnavailable(err)
	})
	b.ForgetClients()
	if err := b.Resume(); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if _, err := b.Inject(b.topic, []byte("x"), time.Now()); err != nil {
		t.Fatal(err)
	}
	if err := c.Ack(t.Context(), receiveOne(t, c, 5*time.Second)); err != nil {
		t.Fatal(err)
	}
	t.Logf("received %s after the server was back", time.Since(start).Round(time.Millisecond))
	awaitReady(t, 5*time.Second, p.Ready)
	if _, err := p.Send(t.Context(), timed(b.topic, "y")); err != nil {
		t.Fatal(err)
	}
}

func TestForgottenSettingsAreSentAgainAfterARefusedReceive(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.consumer(t)
	if _, err := b.Inject(b.topic, []byte("x"), time.Now()); err != nil {
		t.Fatal(err)
	}
	// A second after its start the client sends its settings once more by itself, and may do so just after they were forgotten.
	for attempt := 1; ; attempt++ {
		b.ForgetClients() // the stream stays: only the refusals tell
		ds, err := c.Receive(t.Context(), 1, 10*time.Second)
		if code, ok := Code(err); ok && code == 50001 {
			break
		}
		if err != nil || attempt == 5 {
			t.Fatalf("receive: %v, want code 50001", err)
		}
		for _, d := range ds {
			if err := c.ChangeInvisible(t.Context(), d, time.Second); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := c.Ack(t.Context(), receiveOne(t, c, 3*time.Second)); err != nil {
		t.Fatal(err)
	}
}

func TestForgottenSettingsAreSentAgainAfterARefusedHeartbeat(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.producer(t) // sends are not refused; only its heartbeat tells
	b.ForgetClients()
	eventually(t, 13*time.Second, "the producer's settings are known again", func() bool { return len(b.Clients()) == 1 })
}

func TestUnansweredSettingsAreSentAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	cfg := b.config(t)
	cfg.RequestTimeout = 500 * time.Millisecond
	c := openConsumer(t, cfg, b.group, b.topic)
	b.Control(lapsetest.Telemetry, nTimes(2, func(context.Context, any) (any, error, bool) { return nil, nil, true }))
	if err := b.Restart(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 5*time.Second, "the loss is noticed", func() bool { return c.Ready() != nil })
	awaitReady(t, 6*time.Second, c.Ready)
	if len(b.Clients()) != 1 {
		t.Error("ready, though the server does not know this client")
	}
}

// nTimes lets f handle the first n requests only.
func nTimes(n int64, f lapsetest.ControlFunc) lapsetest.ControlFunc {
	var left atomic.Int64
	left.Store(n)
	return func(ctx context.Context, req any) (any, error, bool) {
		if left.Add(-1) < 0 {
			return nil, nil, false
		}
		return f(ctx, req)
	}
}

func TestHalfOpenConnectionIsReplaced(t *testing.T) {
	t.Parallel()
	b := setup(t)
	w := newWire(t, b.Endpoint())
	cfg := b.config(t)
	cfg.Endpoints = w.addr
	reg := prometheus.NewRegistry()
	cfg.Registerer = reg
	p, c := openProducer(t, cfg, b.topic), openConsumer(t, cfg, b.group, b.topic)

	w.swallow()
	start := time.Now()
	var sends sync.WaitGroup
	var sent atomic.Int64
	sends.Go(func() { // a relay that goes on trying
		eventually(t, 30*time.Second, "a send succeeds", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			_, err := p.Send(ctx, timed(b.topic, "x"))
			return err == nil
		})
		sent.Store(int64(time.Since(start)))
	})
	d := receiveOne(t, c, 30*time.Second)
	received := time.Since(start)
	sends.Wait()
	if err := c.Ack(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	if n := counter(t, reg, "lapse_rocketmq_connections_replaced_total"); n != 2 {
		t.Errorf("%v connections replaced, want 2", n)
	}
	t.Logf("sent again after %s, received again after %s", time.Duration(sent.Load()).Round(time.Millisecond), received.Round(time.Millisecond))
}

func TestIdleHalfOpenConnectionIsReplaced(t *testing.T) {
	t.Parallel()
	b := setup(t)
	w := newWire(t, b.Endpoint())
	cfg := b.config(t)
	cfg.Endpoints = w.addr
	p := openProducer(t, cfg, b.topic)
	w.swallow()
	start := time.Now()
	// Nobody sends: the heartbeats alone must notice, within 10 s + 2 timeouts.
	eventually(t, 20*time.Second, "a second connection", func() bool { return w.accepted.Load() == 2 })
	t.Logf("replaced after %s", time.Since(start).Round(time.Millisecond))
	awaitReady(t, 5*time.Second, p.Ready)
}

func TestSendReturnsPromptlyWhileTheServerIsDown(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p := b.producer(t)
	b.Stop()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			start := time.Now()
			_, err := p.Send(ctx, timed(b.topic, "x"))
			if took := time.Since(start); !IsUnavailable(err) || took > 300*time.Millisecond {
				t.Errorf("send: %v after %s, want unavailable within 200ms", err, took)
			}
		})
	}
	wg.Wait()
}

func TestNoCallOutlastsItsContextWhileTheServerIsFrozen(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p, c := b.producer(t), b.consumer(t)
	if _, err := b.Inject(b.topic, []byte("x"), time.Now()); err != nil {
		t.Fatal(err)
	}
	d := receiveOne(t, c, 5*time.Second)
	b.Freeze()
	calls := []struct {
		name string
		f    func(context.Context) error
	}{
		{"send", func(ctx context.Context) error { _, err := p.Send(ctx, timed(b.topic, "x")); return err }},
		{"receive", func(ctx context.Context) error { _, err := c.Receive(ctx, 1, 10*time.Second); return err }},
		{"ack", func(ctx context.Context) error { return c.Ack(ctx, d) }},
		{"change", func(ctx context.Context) error { return c.ChangeInvisible(ctx, d, time.Minute) }},
		{"close", p.Close},
	}
	for _, call := range calls {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		start := time.Now()
		err := call.f(ctx)
		cancel()
		if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took > 400*time.Millisecond {
			t.Errorf("%s: %v after %s, want context.DeadlineExceeded after 200ms", call.name, err, took)
		}
	}
	b.Thaw()
}

func TestRequestTimeoutEndsACallWithoutDeadline(t *testing.T) {
	t.Parallel()
	b := setup(t)
	cfg := b.config(t)
	cfg.RequestTimeout = 500 * time.Millisecond
	p := openProducer(t, cfg, b.topic)
	b.Freeze()
	start := time.Now()
	_, err := p.Send(t.Context(), timed(b.topic, "x"))
	if took := time.Since(start); !IsUnavailable(err) || took > 700*time.Millisecond {
		t.Errorf("send: %v after %s, want unavailable after 500ms", err, took)
	}
	b.Thaw()
}

func TestMissingSettingsAreReportedAndWaitedFor(t *testing.T) {
	t.Parallel()
	b := setup(t)
	allow := b.Control(lapsetest.Telemetry, func(context.Context, any) (any, error, bool) { return nil, nil, true })
	cfg := b.config(t)
	cfg.RequestTimeout = 500 * time.Millisecond
	p, c := newProducer(t, cfg, b.topic), newConsumer(t, cfg, b.group, b.topic)
	eventually(t, 5*time.Second, "Ready names the settings", func() bool {
		return strings.Contains(p.Ready().Error(), "no settings from "+b.Endpoint()) && strings.Contains(c.Ready().Error(), "no settings from ")
	})
	_, err := p.Send(t.Context(), timed(b.topic, "x"))
	if !errors.Is(err, ErrNotReady) || !strings.Contains(err.Error(), "no settings") {
		t.Errorf("send: %v, want ErrNotReady with its cause", err)
	}
	if _, err := c.Receive(t.Context(), 1, 10*time.Second); !errors.Is(err, ErrNotReady) {
		t.Errorf("receive: %v, want ErrNotReady", err)
	}
	allow() // the settings were swallowed: only a new stream brings them
	awaitReady(t, 5*time.Second, p.Ready)
	awaitReady(t, 5*time.Second, c.Ready)
}

func TestCloseDoesNotWaitForSettings(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.Control(lapsetest.Telemetry, func(context.Context, any) (any, error, bool) { return nil, nil, true })
	p, err := NewProducer(b.config(t), b.topic)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, 5*time.Second, "the settings are asked for", func() bool { return b.Calls(lapsetest.Telemetry) > 0 })
	start := time.Now()
	if err := p.Close(within(t, 5*time.Second)); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took > 2500*time.Millisecond {
		t.Errorf("close took %s", took)
	}
	if err := p.Ready(); !errors.Is(err, ErrClosed) {
		t.Errorf("ready after close: %v", err)
	}
	if _, err := p.Send(t.Context(), timed(b.topic, "x")); !errors.Is(err, ErrClosed) {
		t.Errorf("send after close: %v", err)
	}
	if err := p.Close(t.Context()); err != nil {
		t.Errorf("second close: %v", err)
	}
}

func TestMissingGroupIsNamedAndWaitedFor(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := newConsumer(t, b.config(t), "not-there", b.topic)
	eventually(t, 5*time.Second, "Ready names the group and the fix", func() bool {
		err := c.Ready().Error()
		return strings.Contains(err, "group not-there") && strings.Contains(err, "mqadmin updateSubGroup") && strings.Contains(err, b.Endpoint())
	})
	b.CreateGroup("not-there", 16)
	awaitReady(t, 5*time.Second, c.Ready)
}

func TestTopicCreatedAfterTheFirstLookUpIsWaitedFor(t *testing.T) {
	t.Parallel()
	b := setup(t, lapsetest.WithRouteCache(20*time.Second))
	p := newProducer(t, b.config(t), "late")
	eventually(t, 5*time.Second, "Ready names the topic", func() bool { return strings.Contains(p.Ready().Error(), "topic late does not exist") })
	b.CreateTopic("late", lapsetest.Delay, 8)
	start := time.Now()
	awaitReady(t, 30*time.Second, p.Ready)
	t.Logf("ready %s after the topic was created", time.Since(start).Round(time.Millisecond))
	if _, err := p.Send(t.Context(), timed("late", "x")); err != nil {
		t.Fatal(err)
	}
}

// case MQ-9
func TestTopicOfTheWrongTypeIsNamedWithItsTypeAndTheFix(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.CreateTopic("normal", lapsetest.Normal, 8)
	unspecified := b.Control(lapsetest.QueryRoute, func(_ context.Context, req any) (any, error, bool) {
		q := req.(*v2.QueryRouteRequest)
		if q.GetTopic().GetName() != "unspecified" {
			return nil, nil, false
		}
		return &v2.QueryRouteResponse{Status: &v2.Status{Code: v2.Code_OK}, MessageQueues: []*v2.MessageQueue{{
			Topic: q.GetTopic(), Broker: &v2.Broker{Name: "b", Endpoints: q.GetEndpoints()},
			AcceptMessageTypes: []v2.MessageType{v2.MessageType_MESSAGE_TYPE_UNSPECIFIED},
		}}}, nil, true
	})
	defer unspecified()
	for topic, found := range map[string]string{"normal": "of type NORMAL", "unspecified": "of type UNSPECIFIED", "absent": "does not exist"} {
		for kind, ready := range map[string]func() error{
			"producer": newProducer(t, b.config(t), topic).Ready,
			"consumer": newConsumer(t, b.config(t), b.group, topic).Ready,
		} {
			eventually(t, 5*time.Second, fmt.Sprintf("the %s names %s, %q and the fix", kind, topic, found), func() bool {
				err := ready().Error()
				return strings.Contains(err, "topic "+topic) && strings.Contains(err, found) && strings.Contains(err, b.Endpoint()) &&
					strings.Contains(err, "mqadmin updateTopic") && strings.Contains(err, "-t "+topic) && strings.Contains(err, "+message.type=DELAY")
			})
		}
	}
	b.CreateTopic("normal", lapsetest.Delay, 8) // changes its type
	awaitReady(t, 15*time.Second, newProducer(t, b.config(t), "normal").Ready)
}

func TestNormalTopicTakesMessagesWithoutDeliveryTime(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.CreateTopic("events", lapsetest.Normal, 1)
	cfg := b.config(t)
	cfg.TopicType = TopicNormal
	p := openProducer(t, cfg, "events")
	if _, err := p.Send(t.Context(), Message{Topic: "events", Body: []byte("x")}); err != nil {
		t.Fatal(err)
	}
	_, err := p.Send(t.Context(), timed("events", "x"))
	if code, _ := Code(err); code != 40014 || !strings.Contains(err.Error(), "the topic takes NORMAL, the message is DELAY") {
		t.Errorf("timed message to a NORMAL topic: %v, want 40014", err)
	}
}

func TestNothingListeningIsNamedAndWaitedFor(t *testing.T) {
	t.Parallel()
	addr := freeAddr(t)
	cfg := Config{Endpoints: addr, TLS: TLS{Disabled: true}, Logger: testLog(t)}
	p := newProducer(t, cfg, "order-timeout")
	eventually(t, 5*time.Second, "Ready says connection refused", func() bool {
		err := p.Ready()
		return errors.Is(err, ErrNotReady) && strings.Contains(err.Error(), "connection refused") && strings.Contains(err.Error(), addr)
	})
	_, err := p.Send(t.Context(), timed("order-timeout", "x"))
	if !errors.Is(err, ErrNotReady) || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("send: %v", err)
	}
	setup(t, lapsetest.WithListenAddress(addr))
	awaitReady(t, 15*time.Second, p.Ready)
}

// Waiting costs nothing: see childWaiting.
func TestWaitingForServersDoesNotGrow(t *testing.T) {
	t.Parallel()
	runChild(t, "waiting")
}

func TestDamagedRepliesDoNotEndTheProcess(t *testing.T) {
	t.Parallel()
	b := setup(t)
	// Metrics without endpoints (metric.go:341), and a command whose handler is nil
	// (client.go:759), before the real settings.
	var n atomic.Int64
	b.Control(lapsetest.Telemetry, func(_ context.Context, req any) (any, error, bool) {
		switch n.Add(1) {
		case 1:
			s := req.(*v2.TelemetryCommand).GetSettings()
			s.Metric = &v2.Metric{On: true}
			s.GetSubscription().LongPollingTimeout = nil
			return &v2.TelemetryCommand{Command: &v2.TelemetryCommand_Settings{Settings: s}}, nil, true
		case 2:
			return &v2.TelemetryCommand{Command: &v2.TelemetryCommand_NotifyUnsubscribeLiteCommand{NotifyUnsubscribeLiteCommand: &v2.NotifyUnsubscribeLiteCommand{}}}, nil, true
		case 3:
			return &v2.TelemetryCommand{}, nil, true
		}
		return nil, nil, false
	})
	c := b.consumer(t)
	for range 3 {
		if err := b.Restart(); err != nil {
			t.Fatal(err)
		}
		eventually(t, 5*time.Second, "the stream is back", func() bool { return b.Streams() == 1 })
	}
	awaitReady(t, 10*time.Second, c.Ready)
	// A message without system properties (message.go:283), beside a good one.
	var once atomic.Bool
	b.Control(lapsetest.ReceiveMessage, func(context.Context, any) (any, error, bool) {
		if once.Swap(true) {
			return nil, nil, false
		}
		good := &v2.Message{
			Topic: &v2.Resource{Name: b.topic}, Body: []byte("good"),
			SystemProperties: &v2.SystemProperties{MessageId: "1", ReceiptHandle: proto.String("h"), BornTimestamp: timestamppb.Now()},
		}
		bad := &v2.Message{Topic: &v2.Resource{Name: b.topic}, Body: []byte("bad")}
		return []*v2.ReceiveMessageResponse{
			{Content: &v2.ReceiveMessageResponse_Status{Status: &v2.Status{Code: v2.Code_OK}}},
			{Content: &v2.ReceiveMessageResponse_Message{Message: bad}},
			{Content: &v2.ReceiveMessageResponse_Message{Message: good}},
		}, nil, true
	})
	ds, err := c.Receive(within(t, 10*time.Second), 32, 10*time.Second)
	if err != nil || len(ds) != 2 || string(ds[1].Body) != "good" {
		t.Errorf("received %v, %v, want the good message beside the damaged one", ds, err)
	}
}

func TestClientPanicBecomesAnError(t *testing.T) {
	t.Parallel()
	f := func() (err error) {
		defer recovered("receive", &err)
		var p *int
		*p = 1
		return nil
	}
	if err := f(); err == nil || !strings.Contains(err.Error(), "receive: the rocketmq client panicked: ") {
		t.Errorf("got %v", err)
	}
}

func TestBrokerUnderFlowControlIsRecognised(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p := b.producer(t)
	for _, code := range []v2.Code{v2.Code_TOO_MANY_REQUESTS, v2.Code_INTERNAL_SERVER_ERROR} {
		before := b.Calls(lapsetest.SendMessage)
		b.FailNext(lapsetest.SendMessage, 1, code)
		_, err := p.Send(t.Context(), timed(b.topic, "x"))
		if !IsFlowControl(err) || IsRefusedMessage(err) || IsUnavailable(err) {
			t.Errorf("send: %v, want flow control and nothing else", err)
		}
		if n := b.Calls(lapsetest.SendMessage) - before; n != 1 {
			t.Errorf("%d requests for one send, want 1", n)
		}
	}
}

func TestServersRetryPolicyDoesNotMultiplySends(t *testing.T) {
	t.Parallel()
	b := setup(t, lapsetest.WithSendAttempts(3))
	p := b.producer(t)
	b.LoseNext(lapsetest.SendMessage, 1)
	if _, err := p.Send(t.Context(), timed(b.topic, "x")); !IsUnavailable(err) {
		t.Errorf("send with a lost answer: %v, want unavailable", err)
	}
	if n := len(b.Sent(b.topic)); n != 1 {
		t.Errorf("%d copies stored, want 1", n)
	}
}

func TestRefusedMessagesAreRecognisedByCode(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p := b.producer(t)
	day := Message{Topic: b.topic, Body: []byte("x"), DeliverAt: time.Now().Add(25 * time.Hour)}
	big, empty, props, key := timed(b.topic, ""), timed(b.topic, ""), timed(b.topic, "x"), timed(b.topic, "x")
	big.Body = make([]byte, 4<<20+1)
	props.Properties = map[string]string{"p": strings.Repeat("x", 20<<10)}
	key.Keys = []string{"a b"}
	for name, c := range map[string]struct {
		m    Message
		code int32
	}{"beyond a day": {day, 40012}, "too large": {big, 41301}, "empty": {empty, 41302}, "properties": {props, 43101}, "key": {key, 40005}} {
		_, err := p.Send(t.Context(), c.m)
		if code, ok := Code(err); !ok || code != c.code || !IsRefusedMessage(err) || !strings.Contains(err.Error(), fmt.Sprint(c.code)) {
			t.Errorf("%s: %v, want refused with %d", name, err, c.code)
		}
	}
	if _, err := p.Send(t.Context(), timed("other", "x")); err == nil || IsRefusedMessage(err) {
		t.Errorf("send to a topic that the producer was not opened for: %v", err)
	}
}

func TestConnectionsWithAndWithoutTLSLiveSideBySide(t *testing.T) {
	t.Parallel()
	plain, secure := setup(t), setup(t, lapsetest.WithTLS())
	tlsConf := secure.config(t)
	tlsConf.TLS = TLS{CAFile: writeFile(t, "ca.pem", secure.CertPEM())}
	for name, p := range map[string]*Producer{"plain": plain.producer(t), "tls": openProducer(t, tlsConf, secure.topic)} {
		if _, err := p.Send(t.Context(), timed("order-timeout", "x")); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTLSFailuresAreExplained(t *testing.T) {
	t.Parallel()
	plain, secure := setup(t), setup(t, lapsetest.WithTLS())
	ca := writeFile(t, "ca.pem", secure.CertPEM())
	for name, c := range map[string]struct {
		b    *bundle
		tls  TLS
		want string // empty: it works
	}{
		"unknown authority":       {secure, TLS{}, "give the CA file of its issuer"},
		"another name":            {secure, TLS{CAFile: ca, ServerName: "elsewhere"}, "the certificate is for another name"},
		"named and known":         {secure, TLS{CAFile: ca, ServerName: "localhost"}, ""},
		"not verified":            {secure, TLS{InsecureSkipVerify: true}, ""},
		"TLS to a plain server":   {plain, TLS{}, "does not speak TLS; turn TLS off"},
		"plaintext to TLS server": {secure, TLS{Disabled: true}, "turn TLS on"},
	} {
		cfg := c.b.config(t)
		cfg.TLS = c.tls
		p := newProducer(t, cfg, c.b.topic)
		if c.want == "" {
			awaitReady(t, 10*time.Second, p.Ready)
			continue
		}
		var last error
		eventually(t, 10*time.Second, name+": Ready says "+c.want, func() bool {
			last = p.Ready()
			return last != nil && strings.Contains(last.Error(), c.want)
		})
		if strings.Count(last.Error(), "x509: ") > 1 {
			t.Errorf("%s: the cause is told twice: %v", name, last)
		}
		t.Logf("%s: %v", name, last)
	}
}

func TestCredentialsSignEveryCall(t *testing.T) {
	t.Parallel()
	b := setup(t, lapsetest.WithCredentials("key", "secret"))
	var unsigned atomic.Int64
	b.Control("", func(ctx context.Context, _ any) (any, error, bool) {
		md, _ := metadata.FromIncomingContext(ctx)
		if token := md.Get("x-mq-session-token"); len(token) != 1 || token[0] != "token" {
			unsigned.Add(1)
		}
		return nil, nil, false
	})
	cfg := b.config(t)
	cfg.AccessKey, cfg.SecretKey, cfg.SecurityToken = "key", "secret", "token"
	p, c := openProducer(t, cfg, b.topic), openConsumer(t, cfg, b.group, b.topic)
	if _, err := p.Send(t.Context(), timed(b.topic, "x")); err != nil {
		t.Fatal(err)
	}
	if err := b.Restart(); err != nil {
		t.Fatal(err)
	}
	if err := c.Ack(t.Context(), receiveOne(t, c, 10*time.Second)); err != nil {
		t.Fatal(err)
	}
	if n := unsigned.Load(); n != 0 {
		t.Errorf("%d calls without the session token", n)
	}

	cfg.SecretKey = "another-secret"
	wrong := newProducer(t, cfg, b.topic)
	eventually(t, 5*time.Second, "Ready names the credentials", func() bool {
		code, _ := Code(wrong.Ready())
		return code == 40100 && strings.Contains(wrong.Ready().Error(), "refuses the credentials")
	})
	if strings.Contains(wrong.Ready().Error(), "another-secret") {
		t.Errorf("the secret is in the error: %v", wrong.Ready())
	}
}

func TestRequestsAreCountedByMethodAndCode(t *testing.T) {
	t.Parallel()
	b := setup(t)
	cfg := b.config(t)
	reg := prometheus.NewRegistry()
	cfg.Registerer = reg
	p, c := openProducer(t, cfg, b.topic), openConsumer(t, cfg, b.group, b.topic) // two on one registerer
	if _, err := p.Send(t.Context(), timed(b.topic, "x")); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Send(t.Context(), timed(b.topic, "")); err == nil {
		t.Fatal("an empty body was accepted")
	}
	if err := c.Ack(t.Context(), receiveOne(t, c, 5*time.Second)); err != nil {
		t.Fatal(err)
	}
	b.Stop()
	if _, err := p.Send(t.Context(), timed(b.topic, "x")); err == nil {
		t.Fatal("sent without a server")
	}
	for labels, want := range map[string]float64{
		"SendMessage OK": 1, "SendMessage MESSAGE_BODY_EMPTY": 1, "SendMessage grpc_Unavailable": 1,
		"AckMessage OK": 1, "QueryRoute OK": 2,
	} {
		l := strings.Fields(labels)
		if got := counter(t, reg, "lapse_rocketmq_requests_total", "method", l[0], "code", l[1]); got != want {
			t.Errorf("%s: counted %v, want %v", labels, got, want)
		}
	}
}

func TestConfigurationIsValidated(t *testing.T) {
	t.Parallel()
	good := Config{Endpoints: "127.0.0.1:1"}
	for name, c := range map[string]struct {
		change func(*Config)
		topics []string
		want   string
	}{
		"no endpoint":       {func(c *Config) { c.Endpoints = "" }, []string{"t"}, "no endpoint"},
		"no port":           {func(c *Config) { c.Endpoints = "host" }, []string{"t"}, `endpoint "host": must be host:port`},
		"port 0":            {func(c *Config) { c.Endpoints = "host:0" }, []string{"t"}, `endpoint "host:0"`},
		"port too high":     {func(c *Config) { c.Endpoints = "a:1;host:70000" }, []string{"t"}, `endpoint "host:70000"`},
		"half a credential": {func(c *Config) { c.AccessKey = "k" }, []string{"t"}, "access key and secret key"},
		"short timeout":     {func(c *Config) { c.RequestTimeout = time.Millisecond }, []string{"t"}, "request timeout 1ms"},
		"negative timeout":  {func(c *Config) { c.RequestTimeout = -time.Second }, []string{"t"}, "request timeout -1s"},
		"topic type":        {func(c *Config) { c.TopicType = "FIFO" }, []string{"t"}, `topic type "FIFO"`},
		"no topic":          {func(*Config) {}, nil, "no topic"},
		"blank topic":       {func(*Config) {}, []string{"a b"}, `topic "a b"`},
		"CA file":           {func(c *Config) { c.TLS.CAFile = "/not/there" }, []string{"t"}, "/not/there"},
		"CA file empty":     {func(c *Config) { c.TLS.CAFile = writeFile(t, "x", nil) }, []string{"t"}, "holds no PEM certificate"},
		"half a key pair":   {func(c *Config) { c.TLS.CertFile = "c" }, []string{"t"}, "client certificate and key"},
	} {
		cfg := good
		c.change(&cfg)
		if p, err := NewProducer(cfg, c.topics...); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", name, err, c.want)
			if p != nil {
				closeInTime(t, p.Close)
			}
		}
	}
	if _, err := NewConsumer(good, "", "t"); err == nil {
		t.Error("a consumer without a group was accepted")
	}
}

func TestSeveralEndpointsAreTriedUntilOneAnswers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, port, _ := net.SplitHostPort(b.Endpoint())
	cfg := b.config(t)
	cfg.Endpoints = freeAddr(t) + "; 127.0.0.1:" + port
	p := openProducer(t, cfg, b.topic)
	if _, err := p.Send(t.Context(), timed(b.topic, "x")); err != nil {
		t.Error(err)
	}
	cfg.Endpoints = "localhost:" + port
	if _, err := openProducer(t, cfg, b.topic).Send(t.Context(), timed(b.topic, "x")); err != nil {
		t.Error(err)
	}
}

func TestEndpointMayBeAnIPv6Address(t *testing.T) {
	t.Parallel()
	b, err := lapsetest.New(lapsetest.WithListenAddress("[::1]:0"))
	if err != nil {
		t.Skipf("no IPv6 here: %v", err)
	}
	t.Cleanup(b.Close)
	b.CreateTopic("t", lapsetest.Delay, 8)
	b.CreateGroup("g", 16)
	cfg := Config{Endpoints: b.Endpoint(), TLS: TLS{Disabled: true}, Logger: testLog(t)}
	p, c := openProducer(t, cfg, "t"), openConsumer(t, cfg, "g", "t")
	if _, err := p.Send(t.Context(), timed("t", "x")); err != nil {
		t.Fatal(err)
	}
	if err := c.Ack(t.Context(), receiveOne(t, c, 5*time.Second)); err != nil {
		t.Error(err)
	}
}

// An idle consumer of the dead-letter topic must not be refused for its type.
func TestSystemTopicsAreNotCheckedForTheirType(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.CreateTopic("%DLQ%"+b.group, lapsetest.Normal, 1)
	awaitReady(t, 10*time.Second, newConsumer(t, b.config(t), b.group, "%DLQ%"+b.group).Ready)
}

// wire is a network between a client and a server. swallow makes the connections
// that are there go dead without a word; those to come work.
type wire struct {
	addr     string
	accepted atomic.Int64
	mu       sync.Mutex
	conns    []*wireConn
}

type wireConn struct {
	net.Conn
	dead atomic.Bool
}

func (c *wireConn) Write(p []byte) (int, error) {
	if c.dead.Load() {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func newWire(t *testing.T, to string) *wire {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{addr: l.Addr().String()}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", to)
			if err != nil {
				_ = in.Close()
				continue
			}
			w.accepted.Add(1)
			a, b := &wireConn{Conn: in}, &wireConn{Conn: out}
			w.mu.Lock()
			w.conns = append(w.conns, a, b)
			w.mu.Unlock()
			for _, pair := range [][2]*wireConn{{a, b}, {b, a}} {
				wg.Go(func() {
					_, _ = io.Copy(pair[0], pair[1])
					if !pair[0].dead.Load() {
						_ = pair[0].Close()
						_ = pair[1].Close()
					}
				})
			}
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		w.mu.Lock()
		for _, c := range w.conns {
			_ = c.Close()
		}
		w.mu.Unlock()
		wg.Wait()
	})
	return w
}

func (w *wire) swallow() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.conns {
		c.dead.Store(true)
	}
}

func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

func counter(t *testing.T, reg prometheus.Gatherer, name string, labels ...string) float64 {
	t.Helper()
	n, err := count(reg, name, labels...)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
