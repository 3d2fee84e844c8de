package lapsetest_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/lapse-orders/lapse/lapsetest"
)

var epoch = time.Date(2026, 11, 30, 15, 0, 0, 0, time.UTC)

// bundle is a Broker with one topic and one group, and a raw client of it.
type bundle struct {
	*raw
	b     *lapsetest.Broker
	clock *lapsetest.Clock
}

const (
	topic = "order-timeout"
	group = "order-timeout-cg"
)

// open starts a Broker on a Clock that stands at epoch.
func open(t *testing.T, retries int, opts ...lapsetest.Option) *bundle {
	t.Helper()
	clock := lapsetest.NewClock(epoch)
	b := lapsetest.Start(t, append([]lapsetest.Option{lapsetest.WithClock(clock)}, opts...)...)
	b.CreateTopic(topic, lapsetest.Delay, 4)
	b.CreateGroup(group, retries)
	u := &bundle{raw: dialRaw(t, b.Endpoint()), b: b, clock: clock}
	u.mustSettle(consumerSettings(group, topic))
	return u
}

// later starts a Receive and returns where its result will be.
func (u *bundle) later(batch int) <-chan receipt {
	out := make(chan receipt, 1)
	before := u.b.Calls(lapsetest.ReceiveMessage)
	ctx := u.ctx(20 * time.Second)
	go func() {
		got, err := u.tryReceive(ctx, group, topic, batch, 10*time.Second)
		if err != nil {
			got.text = err.Error()
		}
		out <- got
	}()
	until(u.t, u.b, "the receive's arrival", func() bool { return u.b.Calls(lapsetest.ReceiveMessage) > before })
	return out
}

func ids(messages []lapsetest.Message) []string {
	var out []string
	for _, m := range messages {
		out = append(out, m.ID)
	}
	return out
}

func TestAdvanceWakesAWaitingReceive(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	due := epoch.Add(30 * time.Minute)
	u.mustSend(newMessage(topic, "b", due))
	got := u.later(1)
	u.clock.Advance(30*time.Minute - time.Millisecond)
	if n := len(u.b.Pending(topic)); n != 1 {
		t.Fatalf("%d pending 1 ms before the deadline, want 1", n)
	}
	u.clock.Advance(time.Millisecond)
	if r := <-got; r.code != v2.Code_OK || len(r.messages) != 1 {
		t.Fatalf("received %+v", r)
	}
	if n := len(u.b.Pending(topic)); n != 0 {
		t.Errorf("%d pending afterwards, want 0", n)
	}
}

func TestDeadlineIsRoundedUpToThePrecision(t *testing.T) {
	t.Parallel()
	u := open(t, 16, lapsetest.WithPrecision(time.Second))
	u.mustSend(newMessage(topic, "on the tick", epoch.Add(10*time.Second)))
	u.mustSend(newMessage(topic, "1 ms after", epoch.Add(10*time.Second+time.Millisecond)))
	for _, step := range []struct {
		to   time.Duration
		want int
	}{
		{10*time.Second - time.Millisecond, 0},
		{10 * time.Second, 1},
		{11*time.Second - time.Millisecond, 1},
		{11 * time.Second, 2},
	} {
		u.clock.Set(epoch.Add(step.to))
		if n := u.b.Ready(topic, group); n != step.want {
			t.Errorf("at %v: %d ready, want %d", step.to, n, step.want)
		}
	}
}

func TestTimersFireInTheOrderOfTheirDeadlines(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	for _, s := range []int{3, 1, 2, 1} {
		u.mustSend(newMessage(topic, fmt.Sprint(s), epoch.Add(time.Duration(s)*time.Second)))
	}
	u.clock.Advance(time.Minute)
	var order []string
	for _, m := range u.receive(group, topic, 32, 10*time.Second, 10*time.Second).messages {
		order = append(order, string(m.GetBody()))
	}
	if want := []string{"1", "1", "2", "3"}; !slices.Equal(order, want) {
		t.Errorf("order %v, want %v", order, want)
	}
}

func TestMessageMovesFromPendingToInFlightToAcked(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	in := newMessage(topic, "b", epoch.Add(time.Second))
	in.SystemProperties.Keys = []string{"17", "18"}
	u.mustSend(in)
	sent := u.b.Sent(topic)
	if len(sent) != 1 || sent[0].ID != idOf(in) || !slices.Equal(sent[0].Keys, []string{"17", "18"}) ||
		string(sent[0].Body) != "b" || !sent[0].DeliverAt.Equal(epoch.Add(time.Second)) || !sent[0].StoredAt.Equal(epoch) {
		t.Fatalf("sent %+v", sent)
	}
	u.clock.Advance(time.Second)
	m := u.next(group, topic, 10*time.Second, time.Second)
	if f := u.b.InFlight(group); len(f) != 1 || f[0].Attempt != 1 || f[0].Group != group {
		t.Errorf("in flight %+v", f)
	}
	u.clock.Advance(10 * time.Second)
	if n, ready := len(u.b.InFlight(group)), u.b.Ready(topic, group); n != 0 || ready != 1 {
		t.Errorf("when the invisible time ends: %d in flight and %d ready, want 0 and 1", n, ready)
	}
	if code := u.ack(group, topic, handleOf(m)); code != v2.Code_INVALID_RECEIPT_HANDLE {
		t.Errorf("ack of the first delivery: %v", code)
	}
	again := u.next(group, topic, 10*time.Second, time.Second)
	if code := u.ack(group, topic, handleOf(again)); code != v2.Code_OK || attemptOf(again) != 2 {
		t.Errorf("ack of attempt %d: %v", attemptOf(again), code)
	}
	if a := u.b.Acked(group); len(a) != 1 || a[0].Attempt != 2 || a[0].ID != idOf(in) {
		t.Errorf("acked %+v", a)
	}
	if n, ready := len(u.b.InFlight(group)), u.b.Ready(topic, group); n != 0 || ready != 0 {
		t.Errorf("after the ack: %d in flight and %d ready, want none", n, ready)
	}
}

func TestRedeliveryLagKeepsAnExpiredMessageAway(t *testing.T) {
	t.Parallel()
	u := open(t, 16, lapsetest.WithRedeliveryLag(2*time.Second))
	u.mustSend(newMessage(topic, "b", epoch))
	m := u.next(group, topic, 10*time.Second, time.Second)
	u.clock.Advance(10 * time.Second)
	if n := u.b.Ready(topic, group); n != 0 {
		t.Errorf("%d ready without the lag, want 0", n)
	}
	if code := u.ack(group, topic, handleOf(m)); code != v2.Code_INVALID_RECEIPT_HANDLE {
		t.Errorf("ack within the lag: %v, want 40013", code)
	}
	u.clock.Advance(2 * time.Second)
	if n := u.b.Ready(topic, group); n != 1 {
		t.Errorf("%d ready after the lag, want 1", n)
	}
}

func TestDeadLettersAreMovedByTheNextReceive(t *testing.T) {
	t.Parallel()
	u := open(t, 1)
	in := newMessage(topic, "b", epoch)
	u.mustSend(in)
	for range 2 {
		u.next(group, topic, 10*time.Second, time.Second)
		u.clock.Advance(10 * time.Second)
	}
	if n := len(u.b.DeadLetters(group)); n != 0 {
		t.Fatalf("%d dead letters before anybody asked, want 0", n)
	}
	if r := u.receive(group, topic, 1, 10*time.Second, 10*time.Second); r.code != v2.Code_MESSAGE_NOT_FOUND {
		t.Fatalf("received %+v", r)
	}
	if d := u.b.DeadLetters(group); len(d) != 1 || d[0].ID != idOf(in) || d[0].Attempt != 2 || d[0].Topic != topic {
		t.Errorf("dead letters %+v", d)
	}
}

func TestSkewMakesMessagesEarly(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	u.mustSend(newMessage(topic, "b", epoch.Add(2*time.Second)))
	u.b.SetSkew(2 * time.Second)
	if n := u.b.Ready(topic, group); n != 1 {
		t.Errorf("%d ready on a clock that is 2 s ahead, want 1", n)
	}
	if now := u.b.Now(); !now.Equal(epoch.Add(2 * time.Second)) {
		t.Errorf("the broker's time is %v", now)
	}
}

func TestDuplicateComesWithTheSameIDAndAttempt1(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	in := newMessage(topic, "b", epoch)
	u.mustSend(in)
	u.mustSend(newMessage(topic, "pending", epoch.Add(time.Hour)))
	m := u.next(group, topic, 10*time.Second, time.Second)
	if code := u.ack(group, topic, handleOf(m)); code != v2.Code_OK {
		t.Fatalf("ack: %v", code)
	}
	for range 2 {
		if n := u.b.Duplicate(topic); n != 1 {
			t.Fatalf("%d duplicates, want 1: what is pending is not delivered twice", n)
		}
		again := u.next(group, topic, 10*time.Second, time.Second)
		if idOf(again) != idOf(in) || attemptOf(again) != 1 {
			t.Errorf("duplicate is attempt %d of %s, want 1 of %s", attemptOf(again), idOf(again), idOf(in))
		}
	}
	if n := u.b.Duplicate(topic, "no such id"); n != 0 {
		t.Errorf("%d duplicates of an unknown id", n)
	}
}

func TestInjectPutsInWhatNoClientCouldSend(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	bodies := [][]byte{nil, {0xff, 0xfe}, bytes.Repeat([]byte("x"), 5<<20)}
	for _, body := range bodies {
		if _, err := u.b.Inject(topic, body, time.Time{}, "k"); err != nil {
			t.Fatalf("inject: %v", err)
		}
	}
	for _, want := range bodies {
		// Raised as by a real consumer: the default of 4 MiB would hide the last one.
		ctx := u.ctx(10 * time.Second)
		stream, err := u.api.ReceiveMessage(ctx, receiveRequest(group, topic, 1), grpc.MaxCallRecvMsgSize(16<<20))
		if err != nil {
			t.Fatalf("receive: %v", err)
		}
		var got *v2.Message
		for {
			frame, err := stream.Recv()
			if err != nil {
				break
			}
			if m := frame.GetMessage(); m != nil {
				got = m
			}
		}
		if !bytes.Equal(got.GetBody(), want) || !slices.Equal(got.GetSystemProperties().GetKeys(), []string{"k"}) {
			t.Errorf("received %d bytes, injected %d", len(got.GetBody()), len(want))
		}
	}
	if _, err := u.b.Inject("no-such-topic", nil, time.Time{}); err == nil {
		t.Error("injecting into an unknown topic worked")
	}
}

func TestFailNextRefusesSoManyRequests(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	u.b.FailNext(lapsetest.SendMessage, 2, v2.Code_TOO_MANY_REQUESTS)
	var seen []v2.Code
	for range 3 {
		seen = append(seen, u.send(newMessage(topic, "b", epoch)).GetStatus().GetCode())
	}
	if want := []v2.Code{v2.Code_TOO_MANY_REQUESTS, v2.Code_TOO_MANY_REQUESTS, v2.Code_OK}; !slices.Equal(seen, want) {
		t.Errorf("codes %v, want %v", seen, want)
	}
	if n := len(u.b.Sent(topic)); n != 1 {
		t.Errorf("%d stored, want 1", n)
	}
	if n := u.b.Calls(lapsetest.SendMessage); n != 3 {
		t.Errorf("%d calls, want 3", n)
	}
}

func TestLoseNextStoresAndDoesNotAnswer(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	u.b.LoseNext(lapsetest.SendMessage, 1)
	req := &v2.SendMessageRequest{Messages: []*v2.Message{newMessage(topic, "b", epoch)}}
	_, err := u.api.SendMessage(u.ctx(5*time.Second), req)
	if status.Code(err) != codes.DeadlineExceeded {
		t.Fatalf("send: %v, want DeadlineExceeded", err)
	}
	u.mustSend(req.GetMessages()[0])
	if got := ids(u.b.Sent(topic)); len(got) != 2 || got[0] != got[1] {
		t.Errorf("stored %v, want the same id twice", got)
	}
	u.b.LoseNext(lapsetest.ReceiveMessage, 1)
	if _, err := u.tryReceive(u.ctx(10*time.Second), group, topic, 1, 10*time.Second); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("receive: %v, want DeadlineExceeded", err)
	}
	if n := len(u.b.InFlight(group)); n != 1 {
		t.Errorf("%d hidden by the receive whose answer was lost, want 1", n)
	}
}

func TestControlMayObserveDelayAnswerAndFail(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	var observed atomic.Int64
	forget := u.b.Control("", func(context.Context, any) (any, error, bool) {
		observed.Add(1)
		return v2.Code_BAD_REQUEST, nil, false // ignored: not handled
	})
	if code := u.heartbeat(group); code != v2.Code_OK {
		t.Errorf("observed heartbeat: %v", code)
	}
	forget()
	if code := u.heartbeat(group); code != v2.Code_OK || observed.Load() != 1 {
		t.Errorf("heartbeat: %v, observed %d times, want once", code, observed.Load())
	}

	held := make(chan struct{})
	forget = u.b.Control(lapsetest.SendMessage, func(ctx context.Context, req any) (any, error, bool) {
		if n := len(req.(*v2.SendMessageRequest).GetMessages()); n != 1 {
			t.Errorf("%d messages in the request", n)
		}
		select {
		case <-held:
		case <-ctx.Done():
		}
		return nil, nil, false
	})
	done := make(chan error, 1)
	ctx := u.ctx(10 * time.Second)
	go func() {
		_, err := u.api.SendMessage(ctx, &v2.SendMessageRequest{Messages: []*v2.Message{newMessage(topic, "b", epoch)}})
		done <- err
	}()
	until(t, u.b, "the send's arrival", func() bool { return u.b.Calls(lapsetest.SendMessage) == 1 })
	if n := len(u.b.Sent(topic)); n != 0 {
		t.Errorf("%d stored while the request is held", n)
	}
	close(held)
	if err := <-done; err != nil || len(u.b.Sent(topic)) != 1 {
		t.Errorf("the delayed send: %v, %d stored", err, len(u.b.Sent(topic)))
	}
	forget()

	u.b.Control(lapsetest.ReceiveMessage, func(context.Context, any) (any, error, bool) {
		return []*v2.ReceiveMessageResponse{{Content: &v2.ReceiveMessageResponse_Message{Message: &v2.Message{Body: []byte("made up")}}}}, nil, true
	})
	if r := u.receive(group, topic, 1, 10*time.Second, 10*time.Second); r.statuses != 0 || len(r.messages) != 1 || string(r.messages[0].GetBody()) != "made up" {
		t.Errorf("received %+v", r)
	}
	u.b.Control(lapsetest.Heartbeat, func(context.Context, any) (any, error, bool) {
		return nil, status.Error(codes.Unavailable, "no"), true
	})
	if _, err := u.api.Heartbeat(u.ctx(5*time.Second), &v2.HeartbeatRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("heartbeat: %v, want Unavailable", err)
	}
}

func TestControlOfAMethodThatDoesNotExistPanics(t *testing.T) {
	t.Parallel()
	b := lapsetest.Start(t)
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	b.Control("SendMesage", nil)
}

func TestRestartForgetsClientsAndKeepsMessages(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	u.mustSend(newMessage(topic, "b", epoch.Add(time.Second)))
	waiting := u.later(1)
	if err := u.b.Restart(); err != nil {
		t.Fatalf("restart: %v", err)
	}
	if r := <-waiting; r.text == "" {
		t.Errorf("the waiting receive survived: %+v", r)
	}
	if _, err := u.stream.Recv(); err == nil {
		t.Error("the telemetry stream survived")
	}
	// The connection is made anew by the client's own backoff.
	eventually(t, "a call after the restart", func() bool {
		_, err := u.api.Heartbeat(u.ctx(time.Second), &v2.HeartbeatRequest{})
		return err == nil
	})
	if code := u.heartbeat(group); code != v2.Code_UNRECOGNIZED_CLIENT_TYPE {
		t.Errorf("heartbeat: %v, want 40015", code)
	}
	if r := u.receive(group, topic, 1, 10*time.Second, 10*time.Second); r.code != v2.Code_INTERNAL_SERVER_ERROR {
		t.Errorf("receive: %v, want 50001", r.code)
	}
	u.stream = nil
	u.mustSettle(consumerSettings(group, topic))
	u.clock.Advance(time.Second)
	if m := u.next(group, topic, 10*time.Second, time.Second); string(m.GetBody()) != "b" {
		t.Errorf("received %v", m)
	}
}

func TestForgetClientsKeepsConnections(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	if n := len(u.b.Clients()); n != 1 {
		t.Fatalf("%d clients, want 1", n)
	}
	u.b.ForgetClients()
	if code := u.heartbeat(group); code != v2.Code_UNRECOGNIZED_CLIENT_TYPE {
		t.Errorf("heartbeat: %v, want 40015", code)
	}
	u.mustSettle(consumerSettings(group, topic)) // on the same stream
	if code := u.heartbeat(group); code != v2.Code_OK {
		t.Errorf("heartbeat: %v, want OK", code)
	}
}

func TestStoppedBrokerRefusesConnectionsUntilItResumes(t *testing.T) {
	t.Parallel()
	b := lapsetest.Start(t)
	addr := b.Endpoint()
	b.Stop()
	b.Stop()
	if c, err := new(net.Dialer).DialContext(t.Context(), "tcp", addr); err == nil {
		_ = c.Close()
		t.Error("something listens on the port of a stopped broker")
	}
	if err := b.Resume(); err != nil {
		t.Fatalf("resume: %v", err)
	}
	if err := b.Resume(); err != nil {
		t.Errorf("second resume: %v", err)
	}
	if b.Endpoint() != addr {
		t.Errorf("the endpoint moved from %s to %s", addr, b.Endpoint())
	}
	b.CreateTopic(topic, lapsetest.Delay, 1)
	if code := dialRaw(t, addr).route(topic).GetStatus().GetCode(); code != v2.Code_OK {
		t.Errorf("route after resume: %v", code)
	}
}

func TestFrozenBrokerTakesBytesAndAnswersNothing(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	waiting := u.later(1)
	u.b.Freeze()
	u.b.Freeze()
	if _, err := u.api.Heartbeat(u.ctx(200*time.Millisecond), &v2.HeartbeatRequest{}); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("heartbeat: %v, want DeadlineExceeded", err)
	}
	if _, err := u.b.Inject(topic, []byte("b"), time.Time{}); err != nil {
		t.Fatalf("inject: %v", err)
	}
	select {
	case r := <-waiting:
		t.Errorf("a frozen broker answered %+v", r)
	default:
	}
	if n := len(u.b.InFlight(group)); n != 0 {
		t.Errorf("a frozen broker handed out %d messages", n)
	}
	c, err := new(net.Dialer).DialContext(t.Context(), "tcp", u.b.Endpoint())
	if err != nil {
		t.Fatalf("a frozen broker takes no connection: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	u.b.Thaw()
	u.b.Thaw()
	if r := <-waiting; len(r.messages) != 1 {
		t.Errorf("after the thaw: %+v", r)
	}
	if code := u.heartbeat(group); code != v2.Code_OK {
		t.Errorf("heartbeat after the thaw: %v", code)
	}
}

func TestHalfOpenSilencesTheConnectionsOfThatMomentOnly(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	waiting := u.later(1)
	u.b.HalfOpen()
	if _, err := u.api.Heartbeat(u.ctx(200*time.Millisecond), &v2.HeartbeatRequest{}); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("heartbeat on the old connection: %v, want DeadlineExceeded", err)
	}
	if _, err := u.b.Inject(topic, []byte("b"), time.Time{}); err != nil {
		t.Fatalf("inject: %v", err)
	}
	until(t, u.b, "the waiting receive's message", func() bool { return len(u.b.InFlight(group)) == 1 })
	fresh := dialRaw(t, u.b.Endpoint())
	fresh.mustSettle(consumerSettings(group, topic))
	if code := fresh.heartbeat(group); code != v2.Code_OK {
		t.Errorf("heartbeat on a new connection: %v", code)
	}
	u.clock.Advance(10 * time.Second)
	if m := fresh.next(group, topic, 10*time.Second, time.Second); attemptOf(m) != 2 {
		t.Errorf("attempt %d of a message whose first answer went nowhere, want 2", attemptOf(m))
	}
	select {
	case r := <-waiting:
		t.Errorf("the old connection answered %+v", r)
	default:
	}
	u.b.Close()
	<-waiting
}

func TestStopEndsAFreeze(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	u.b.Freeze()
	if err := u.b.Restart(); err != nil {
		t.Fatalf("restart: %v", err)
	}
	if code := dialRaw(t, u.b.Endpoint()).route(topic).GetStatus().GetCode(); code != v2.Code_OK {
		t.Errorf("route: %v", code)
	}
}

func TestCloseEndsEverythingAndMayBeRepeated(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	waiting := u.later(1)
	u.b.Freeze() // the hardest case: writes are blocked
	u.b.Close()
	u.b.Close()
	if r := <-waiting; r.text == "" {
		t.Errorf("the waiting receive got %+v", r)
	}
	if n, s := u.b.Conns(), u.b.Streams(); n != 0 || s != 0 {
		t.Errorf("%d connections and %d streams are left", n, s)
	}
	if err := u.b.Resume(); err == nil {
		t.Error("a closed broker resumed")
	}
	u.clock.Advance(time.Hour) // watches no closed broker, and does not hang
	if n := len(u.b.Sent("")); n != 0 {
		t.Errorf("%d sent", n)
	}
}

func TestRouteCacheRemembersAMissingTopic(t *testing.T) {
	t.Parallel()
	clock := lapsetest.NewClock(epoch)
	b := lapsetest.Start(t, lapsetest.WithRouteCache(20*time.Second), lapsetest.WithClock(clock))
	u := dialRaw(t, b.Endpoint())
	if code := u.route("late").GetStatus().GetCode(); code != v2.Code_TOPIC_NOT_FOUND {
		t.Fatalf("route of a topic that is not there: %v", code)
	}
	b.CreateTopic("late", lapsetest.Delay, 1)
	clock.Advance(20*time.Second - time.Millisecond)
	if code := u.route("late").GetStatus().GetCode(); code != v2.Code_TOPIC_NOT_FOUND {
		t.Errorf("route within the 20 s: %v, want 40402", code)
	}
	clock.Advance(time.Millisecond)
	if code := u.route("late").GetStatus().GetCode(); code != v2.Code_OK {
		t.Errorf("route after the 20 s: %v", code)
	}
}

func TestPollLimitShortensAnEmptyReceive(t *testing.T) {
	t.Parallel()
	u := open(t, 16, lapsetest.WithPollLimit(50*time.Millisecond))
	start := time.Now()
	if r := u.receive(group, topic, 1, 10*time.Second, 20*time.Second); r.code != v2.Code_MESSAGE_NOT_FOUND {
		t.Errorf("received %+v", r)
	}
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("an empty receive with a limit of 50 ms took %v", took)
	}
}

func TestSendAttemptsAreToldToProducers(t *testing.T) {
	t.Parallel()
	b := lapsetest.Start(t, lapsetest.WithSendAttempts(3))
	b.CreateTopic(topic, lapsetest.Delay, 1)
	if p := dialRaw(t, b.Endpoint()).mustSettle(producerSettings(topic)).GetBackoffPolicy(); p.GetMaxAttempts() != 3 || p.GetExponentialBackoff() == nil {
		t.Errorf("policy %v", p)
	}
	c := lapsetest.Start(t)
	if p := dialRaw(t, c.Endpoint()).mustSettle(producerSettings(topic)).GetBackoffPolicy(); p != nil {
		t.Errorf("policy without the option: %v", p)
	}
}

func TestRecallTakesAMessageBackWhenAllowed(t *testing.T) {
	t.Parallel()
	u := open(t, 16, lapsetest.WithRecall())
	in := newMessage(topic, "b", epoch.Add(time.Minute))
	handle := u.mustSend(in).GetEntries()[0].GetRecallHandle()
	u.mustSend(newMessage(topic, "other", epoch.Add(time.Minute)))
	recall := func(h string) (v2.Code, string) {
		out, err := u.api.RecallMessage(u.ctx(5*time.Second), &v2.RecallMessageRequest{Topic: res(topic), RecallHandle: h})
		if err != nil {
			t.Fatalf("recall: %v", err)
		}
		return out.GetStatus().GetCode(), out.GetMessageId()
	}
	for range 2 { // success says nothing about the message
		if code, id := recall(handle); code != v2.Code_OK || id != idOf(in) {
			t.Errorf("recall: %v of %q", code, id)
		}
	}
	if code, _ := recall("garbage"); code != v2.Code_INTERNAL_SERVER_ERROR {
		t.Errorf("recall of garbage: %v", code)
	}
	u.clock.Advance(time.Minute)
	if code, _ := recall(handle); code != v2.Code_INTERNAL_SERVER_ERROR {
		t.Errorf("recall after the deadline: %v", code)
	}
	if r := u.receive(group, topic, 32, 10*time.Second, 10*time.Second); len(r.messages) != 1 || string(r.messages[0].GetBody()) != "other" {
		t.Errorf("received %+v, want the other one alone", r)
	}
}

func TestTLSIsTrustedByItsPoolOnly(t *testing.T) {
	t.Parallel()
	b := lapsetest.Start(t, lapsetest.WithTLS())
	b.CreateTopic(topic, lapsetest.Delay, 1)
	fromPEM := x509.NewCertPool()
	if !fromPEM.AppendCertsFromPEM(b.CertPEM()) {
		t.Fatal("the PEM holds no certificate")
	}
	for _, pool := range []*x509.CertPool{b.CertPool(), fromPEM} {
		r := dialRaw(t, b.Endpoint(), grpc.WithTransportCredentials(credentials.NewClientTLSFromCert(pool, "")))
		if code := r.route(topic).GetStatus().GetCode(); code != v2.Code_OK {
			t.Errorf("route: %v", code)
		}
	}
	stranger := dialRaw(t, b.Endpoint(), grpc.WithTransportCredentials(credentials.NewClientTLSFromCert(x509.NewCertPool(), "")))
	if _, err := stranger.api.Heartbeat(stranger.ctx(5*time.Second), &v2.HeartbeatRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("a client that does not know the certificate: %v, want Unavailable", err)
	}
	plain := dialRaw(t, b.Endpoint())
	if _, err := plain.api.Heartbeat(plain.ctx(5*time.Second), &v2.HeartbeatRequest{}); err == nil {
		t.Error("a plaintext client got an answer")
	}
}

func TestCredentialsAreChecked(t *testing.T) {
	t.Parallel()
	b := lapsetest.Start(t, lapsetest.WithCredentials("key", "secret"))
	b.CreateTopic(topic, lapsetest.Delay, 1)
	if p := startSignedProducer(t, b.Endpoint(), "key", "secret", topic); p == nil {
		t.Fatal("no producer")
	}
	r := dialRaw(t, b.Endpoint())
	if code := r.route(topic).GetStatus().GetCode(); code != v2.Code_UNAUTHORIZED {
		t.Errorf("route without a signature: %v, want 40100", code)
	}
	ctx := metadata.AppendToOutgoingContext(r.ctx(5*time.Second), "authorization",
		"MQv2-HMAC-SHA1 Credential=key//Rocketmq, SignedHeaders=x-mq-date-time, Signature=00")
	out, err := r.api.QueryRoute(ctx, &v2.QueryRouteRequest{Topic: res(topic)})
	if err != nil || out.GetStatus().GetCode() != v2.Code_UNAUTHORIZED {
		t.Errorf("route with a wrong signature: %v, %v", out.GetStatus(), err)
	}
}

func TestNamespaceIsPartOfTheName(t *testing.T) {
	t.Parallel()
	b := lapsetest.Start(t)
	b.CreateTopic("shop%"+topic, lapsetest.Delay, 1)
	r := dialRaw(t, b.Endpoint())
	in := &v2.Resource{ResourceNamespace: "shop", Name: topic}
	out, err := r.api.QueryRoute(r.ctx(5*time.Second), &v2.QueryRouteRequest{Topic: in})
	if err != nil || out.GetStatus().GetCode() != v2.Code_OK || out.GetMessageQueues()[0].GetTopic().GetResourceNamespace() != "shop" {
		t.Errorf("route: %v, %v", out, err)
	}
	if got := out.GetMessageQueues()[0].GetBroker().GetEndpoints().GetAddresses(); len(got) != 1 || fmt.Sprintf("%s:%d", got[0].GetHost(), got[0].GetPort()) != b.Endpoint() {
		t.Errorf("endpoints for a request that names none: %v, want %s", got, b.Endpoint())
	}
	if code := r.route(topic).GetStatus().GetCode(); code != v2.Code_TOPIC_NOT_FOUND {
		t.Errorf("route without the namespace: %v", code)
	}
}

func TestTwoGroupsEachGetEveryMessage(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	u.b.CreateGroup("other", 16)
	u.mustSend(newMessage(topic, "b", epoch))
	for _, g := range []string{group, "other"} {
		m := u.next(g, topic, 10*time.Second, time.Second)
		if code := u.ack(g, topic, handleOf(m)); code != v2.Code_OK || len(u.b.Acked(g)) != 1 {
			t.Errorf("ack in %s: %v, %d acked", g, code, len(u.b.Acked(g)))
		}
	}
}

func TestParallelReceiversShareTheMessages(t *testing.T) {
	t.Parallel()
	u := open(t, 16, lapsetest.WithPollLimit(100*time.Millisecond))
	const n = 500
	for i := range n {
		u.mustSend(newMessage(topic, fmt.Sprint(i), epoch))
	}
	var mu sync.Mutex
	seen := make(map[string]int)
	var wg sync.WaitGroup
	for range 8 {
		r := dialRaw(t, u.b.Endpoint())
		r.mustSettle(consumerSettings(group, topic))
		wg.Go(func() {
			for {
				got, err := r.tryReceive(r.ctx(10*time.Second), group, topic, 32, time.Minute)
				if err != nil {
					t.Errorf("receive: %v", err)
				}
				if err != nil || got.code == v2.Code_MESSAGE_NOT_FOUND {
					return
				}
				var entries []*v2.AckMessageEntry
				mu.Lock()
				for _, m := range got.messages {
					seen[string(m.GetBody())]++
					entries = append(entries, &v2.AckMessageEntry{ReceiptHandle: handleOf(m)})
				}
				mu.Unlock()
				out, err := r.api.AckMessage(r.ctx(5*time.Second), &v2.AckMessageRequest{Group: res(group), Topic: res(topic), Entries: entries})
				if err != nil || out.GetStatus().GetCode() != v2.Code_OK {
					t.Errorf("ack: %v, %v", out.GetStatus(), err)
				}
			}
		})
	}
	wg.Wait()
	for body, times := range seen {
		if times != 1 {
			t.Errorf("message %s came %d times", body, times)
		}
	}
	if len(seen) != n || len(u.b.Acked(group)) != n {
		t.Errorf("%d of %d came, %d acked", len(seen), n, len(u.b.Acked(group)))
	}
}

func TestRealTimeFiresWithoutAClock(t *testing.T) {
	t.Parallel()
	b := lapsetest.Start(t)
	b.CreateTopic(topic, lapsetest.Delay, 1)
	b.CreateGroup(group, 16)
	u := dialRaw(t, b.Endpoint())
	u.mustSettle(consumerSettings(group, topic))
	due := time.Now().Add(300 * time.Millisecond)
	u.mustSend(newMessage(topic, "b", due))
	u.next(group, topic, 10*time.Second, 10*time.Second)
	if late := time.Since(due); late < 0 || late > 2*time.Second {
		t.Errorf("came %v after its deadline", late)
	}
}

func TestNewRefusesAPrecisionBelowAMillisecond(t *testing.T) {
	t.Parallel()
	if b, err := lapsetest.New(lapsetest.WithPrecision(time.Microsecond)); err == nil {
		b.Close()
		t.Error("no error")
	}
}

func TestUntilEndsWithItsContext(t *testing.T) {
	t.Parallel()
	b := lapsetest.Start(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.Until(ctx, func() bool { return false }); err == nil {
		t.Error("no error")
	}
}

func TestMaxDelayIsAnOption(t *testing.T) {
	t.Parallel()
	u := open(t, 16, lapsetest.WithMaxDelay(5*time.Second))
	wantCode(t, "at the limit", u.send(newMessage(topic, "b", epoch.Add(5*time.Second))).GetStatus().GetCode(), v2.Code_OK)
	wantCode(t, "above it", u.send(newMessage(topic, "b", epoch.Add(5*time.Second+time.Millisecond))).GetStatus().GetCode(), v2.Code_ILLEGAL_DELIVERY_TIME)
	free := open(t, 16, lapsetest.WithMaxDelay(0))
	wantCode(t, "without a limit", free.send(newMessage(topic, "b", epoch.AddDate(1, 0, 0))).GetStatus().GetCode(), v2.Code_OK)
}

func TestListenAddressThatIsTakenIsAnError(t *testing.T) {
	t.Parallel()
	taken := lapsetest.Start(t)
	if b, err := lapsetest.New(lapsetest.WithListenAddress(taken.Endpoint())); err == nil {
		b.Close()
		t.Errorf("two brokers on %s", taken.Endpoint())
	}
}

func TestCreateTopicAgainChangesItsType(t *testing.T) {
	t.Parallel()
	u := open(t, 16)
	u.b.CreateTopic(topic, lapsetest.Normal, 1)
	r := u.route(topic)
	if n := len(r.GetMessageQueues()); n != 4 || r.GetMessageQueues()[0].GetAcceptMessageTypes()[0] != v2.MessageType_NORMAL {
		t.Errorf("%d queues of type %v, want the 4 it had, of type NORMAL", n, r.GetMessageQueues()[0].GetAcceptMessageTypes())
	}
}
