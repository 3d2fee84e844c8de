package rmq

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

// A proxy keeps what it knows of a client, its settings, only as long as the
// telemetry stream on which they came. Without them it refuses heartbeats with
// 40015 and every Receive with 50001. The official client opens a lost stream
// again at its next settings tick, up to five minutes later (clients#1137). So
// the stream is kept here: a session opens it, sends the settings, and does so
// again whenever it is lost, until the link is closed.

// The pause before a lost stream is opened again. Shorter would spin against a
// server that accepts and closes; longer would add to every restart of a proxy.
const telemetryPause = 500 * time.Millisecond

// How often a refused call may have the stream opened again: the same codes have
// other causes too, which that does not mend.
const reopenPause = 2 * time.Second

// session keeps one telemetry stream. It is ended by the end of its link.
type session struct {
	link   *link
	target string

	toClient chan *v2.TelemetryCommand // settings replies; only the newest is kept

	mu      sync.Mutex
	stream  v2.MessagingService_TelemetryClient // nil while there is none
	end     context.CancelCauseFunc             // of stream
	cause   error                               // why there is none; nil once settings have come back
	seen    bool                                // settings came back at least once
	away    bool                                // and the stream has been lost since
	since   time.Time                           // of away
	settled time.Time                           // settings came back last
	forced  time.Time                           // reopen was last heeded
}

var errNoSettings = errors.New("the server has not answered with settings yet")

// session returns the session of a target, starting it when there is none.
func (l *link) session(target string) *session {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s, ok := l.sessions[target]; ok {
		return s
	}
	s := &session{
		link: l, target: target,
		toClient: make(chan *v2.TelemetryCommand, 1),
		cause:    errNoSettings,
	}
	l.sessions[target] = s
	if !l.closed {
		l.wg.Go(s.run)
	}
	return s
}

// health returns nil, or why the session with a current target does not stand.
func (l *link) health() error {
	for target := range l.targets() {
		l.mu.Lock()
		s := l.sessions[target]
		l.mu.Unlock()
		if s == nil {
			continue // the route is new; its first call opens the session
		}
		if err := s.down(); err != nil {
			return err
		}
	}
	return nil
}

func (s *session) down() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cause
}

// reopen ends the current stream, so that the settings are sent again. asked is
// the start of the call whose refusal is the reason: when the settings have come
// since, it is outdated.
func (s *session) reopen(reason string, asked time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.end == nil || s.cause != nil || asked.Before(s.settled) || time.Since(s.forced) < reopenPause {
		return // under way already, or no help
	}
	s.forced, s.cause = time.Now(), errors.New(reason)
	s.end(s.cause)
}

// run opens the stream again and again until the link ends.
func (s *session) run() {
	for s.link.ctx.Err() == nil {
		err := s.runOnce()
		if s.link.ctx.Err() != nil {
			return
		}
		s.lost(s.link.explain(err))
		select {
		case <-time.After(telemetryPause):
		case <-s.link.ctx.Done():
		}
	}
}

// lost keeps why there is no stream; once, when it stood before, it is logged.
func (s *session) lost(err error) {
	s.mu.Lock()
	first := s.seen && !s.away
	if first {
		s.away, s.since = true, time.Now()
	}
	s.cause = err
	s.mu.Unlock()
	if first {
		s.link.log.Warn("rocketmq connection lost, making it again", "target", s.target, "err", err)
	}
}

// runOnce opens the stream, sends the settings, and receives until it ends, with
// the reason.
func (s *session) runOnce() error {
	cc, err := s.link.conn(s.target)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(s.link.ctx)
	defer cancel(nil)
	stream, err := v2.NewMessagingServiceClient(cc).Telemetry(s.link.signed(ctx))
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.stream, s.end = stream, cancel
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.stream, s.end = nil, nil
	}()
	s.sendSettings()
	// A server that keeps the stream and does not answer is as good as none.
	overdue := time.AfterFunc(s.link.cfg.RequestTimeout, func() { cancel(errNoSettings) })
	defer overdue.Stop()
	for {
		cmd, err := stream.Recv()
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, io.EOF):
			return errors.New("the server closed the telemetry stream")
		case err != nil:
			return err
		case cmd.GetSettings() != nil:
			overdue.Stop()
		}
		if err := s.received(cmd); err != nil {
			return err
		}
	}
}

// received passes a settings reply on. The rest is kept from the client: on
// commands for other kinds of clients it calls functions that are nil
// (client.go:761), and a stack dump is nothing to hand to a server.
func (s *session) received(cmd *v2.TelemetryCommand) error {
	settings := cmd.GetSettings()
	if settings == nil {
		if st := cmd.GetStatus(); st != nil && st.GetCode() != v2.Code_OK {
			return refusal(int32(st.GetCode()), st.GetMessage())
		}
		s.link.log.Debug("rocketmq telemetry command ignored", "target", s.target)
		return nil
	}
	settings = proto.CloneOf(settings)
	// Both are written without a lock while other goroutines read them
	// (producer_options.go:155, metric.go:354). The number of attempts is ours to
	// say, and the client's own meter is off.
	settings.BackoffPolicy = nil
	settings.Metric = nil
	s.mu.Lock()
	back, after := s.away, time.Since(s.since)
	s.cause, s.seen, s.away, s.settled = nil, true, false, time.Now()
	s.mu.Unlock()
	if back {
		s.link.metrics.reconnects.Inc()
		s.link.log.Info("rocketmq connection is back", "target", s.target, "after", after.Round(time.Millisecond))
	}
	s.offer(&v2.TelemetryCommand{Status: cmd.GetStatus(), Command: &v2.TelemetryCommand_Settings{Settings: settings}})
	return nil
}

// offer replaces a reply that the client has not taken yet.
func (s *session) offer(cmd *v2.TelemetryCommand) {
	for {
		select {
		case s.toClient <- cmd:
			return
		default:
		}
		select {
		case <-s.toClient:
		default:
		}
	}
}

// sendSettings sends the newest settings, if there are any and a stream. An error
// is seen by the receiving side, which repairs.
func (s *session) sendSettings() {
	s.link.mu.Lock()
	settings := s.link.settings
	s.link.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stream != nil && settings != nil {
		_ = s.stream.Send(settings)
	}
}

// telemetry is the stream that the client gets.
func (l *link) telemetry(ctx context.Context, target string) (grpc.ClientStream, error) {
	if l.ctx.Err() != nil {
		return nil, ErrClosed
	}
	return &telemetryStream{ctx: ctx, session: l.session(target)}, nil
}

// telemetryStream is the client's end of a session. Its Send never fails and its
// Recv fails only after the link has ended.
type telemetryStream struct {
	ctx      context.Context // grpc.ClientStream has a Context method
	session  *session
	finished bool // Recv only
}

// SendMsg keeps the settings and sends them on.
func (t *telemetryStream) SendMsg(m any) error {
	cmd, ok := m.(*v2.TelemetryCommand)
	if !ok || cmd.GetSettings() == nil {
		return nil
	}
	l := t.session.link
	l.mu.Lock()
	l.settings = proto.CloneOf(cmd)
	l.mu.Unlock()
	t.session.sendSettings()
	return nil
}

// RecvMsg returns the settings replies. When the link ends it returns one more,
// made up: Start waits for it, and would otherwise wait for ever, or read an error
// that another goroutine writes without a lock (client.go:123).
func (t *telemetryStream) RecvMsg(m any) error {
	out := m.(*v2.TelemetryCommand)
	select {
	case cmd := <-t.session.toClient:
		proto.Merge(out, cmd)
		return nil
	case <-t.session.link.ctx.Done():
	}
	if t.finished {
		return ErrClosed
	}
	t.finished = true
	t.session.link.mu.Lock()
	defer t.session.link.mu.Unlock()
	if t.session.link.settings == nil {
		return ErrClosed
	}
	own := proto.CloneOf(t.session.link.settings.GetSettings())
	own.BackoffPolicy = nil
	out.Command = &v2.TelemetryCommand_Settings{Settings: own}
	return nil
}

func (t *telemetryStream) CloseSend() error             { return nil }
func (t *telemetryStream) Header() (metadata.MD, error) { return nil, nil }
func (t *telemetryStream) Trailer() metadata.MD         { return nil }
func (t *telemetryStream) Context() context.Context     { return t.ctx }
