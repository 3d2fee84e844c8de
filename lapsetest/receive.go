package lapsetest

import (
	"context"
	"crypto/md5" //nolint:gosec // the protocol's body digest
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

type receiveStream = grpc.ServerStreamingServer[v2.ReceiveMessageResponse]

// ReceiveMessage waits for messages and answers with a status and the messages.
func (s *service) ReceiveMessage(req *v2.ReceiveMessageRequest, stream receiveStream) error {
	b := s.b
	ctx := stream.Context()
	answer, err, done := b.before(ctx, ReceiveMessage, req)
	if !done {
		answer, err = b.receive(ctx, req, s.stop)
		if err == nil && b.lose(ReceiveMessage) {
			return errLost
		}
	}
	if err != nil {
		return err
	}
	switch a := answer.(type) {
	case []*v2.ReceiveMessageResponse:
		for _, frame := range a {
			if err := stream.Send(frame); err != nil {
				return err
			}
		}
	case *v2.Status:
		return stream.Send(statusFrame(a))
	}
	return nil
}

func statusFrame(st *v2.Status) *v2.ReceiveMessageResponse {
	return &v2.ReceiveMessageResponse{Content: &v2.ReceiveMessageResponse_Status{Status: st}}
}

// receive returns the frames of an answer, or a status alone.
func (b *Broker) receive(ctx context.Context, req *v2.ReceiveMessageRequest, stop <-chan struct{}) (any, error) {
	b.mu.Lock()
	settings := b.clients[clientID(ctx)]
	b.mu.Unlock()
	if settings.GetSubscription() == nil {
		// The real proxy does not expect this either (rocketmq#8714).
		return result(v2.Code_INTERNAL_SERVER_ERROR, `java.lang.NullPointerException: Cannot invoke "Settings.getSubscription()" because "settings" is null`), nil
	}
	if _, ok := ctx.Deadline(); !ok {
		return result(v2.Code_INTERNAL_SERVER_ERROR, `Cannot invoke "java.lang.Long.longValue()" because "timeRemaining" is null. NullPointerException.`), nil
	}
	poll, ok := pollTime(ctx, req, settings)
	if !ok {
		return result(v2.Code_ILLEGAL_POLLING_TIME, "The deadline time remaining is not enough for polling, please check network condition"), nil
	}
	if l := b.opts.pollLimit; l > 0 && poll > l {
		poll = l
	}
	invisible := req.GetInvisibleDuration().AsDuration()
	if st := checkInvisible(invisible, minInvisible); st != nil {
		return st, nil
	}
	wanted, st := filter(req.GetFilterExpression())
	if st != nil {
		return st, nil
	}
	b.mu.Lock()
	t, st := b.findTopic(req.GetMessageQueue().GetTopic())
	var g *group
	if st == nil {
		g, st = b.findGroup(req.GetGroup())
	}
	if st != nil {
		b.mu.Unlock()
		switch st.GetCode() { // what is not there ends in an exception of the real one
		case v2.Code_TOPIC_NOT_FOUND, v2.Code_CONSUMER_GROUP_NOT_FOUND:
			st = result(v2.Code_INTERNAL_SERVER_ERROR, st.GetMessage())
		}
		return st, nil
	}
	c := t.cursorOf(g)
	b.mu.Unlock()

	limit := min(int(req.GetBatchSize()), maxBatch)
	end := time.NewTimer(poll)
	defer end.Stop()
	gone := ctx.Done()
	for {
		ghost := ctx.Err() != nil
		if ghost && !b.opts.ghostPolls {
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		if ghost {
			gone = stop // the client can end it no more
		}
		if !b.gate.pass(gone) {
			if ghost { // the server stops
				return nil, status.FromContextError(ctx.Err()).Err()
			}
			continue // the client has gone
		}
		b.mu.Lock()
		taken, died := b.pop(c, limit, invisible, wanted)
		if len(taken) > 0 && ghost {
			for _, d := range taken {
				d.attempt--
				b.hide(d, b.now(), nackTime)
			}
			b.mu.Unlock()
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		if len(taken) > 0 {
			frames := b.frames(taken, req)
			b.mu.Unlock()
			return frames, nil
		}
		woken, next := b.visible, b.untilNext(c)
		b.mu.Unlock()
		if died > 0 { // the real one does not go on polling either
			return result(v2.Code_MESSAGE_NOT_FOUND, "no match message"), nil
		}
		select {
		case <-woken:
		case <-next:
		case <-end.C:
			return result(v2.Code_MESSAGE_NOT_FOUND, "no new message"), nil
		case <-gone:
			if ghost { // the server stops
				return nil, status.FromContextError(ctx.Err()).Err()
			}
		}
	}
}

// untilNext returns a channel that fires when something will show for c; nil under
// a Clock, whose Advance wakes. The caller holds mu.
func (b *Broker) untilNext(c *cursor) <-chan time.Time {
	at, ok := c.nextVisible()
	if !ok || b.opts.clock != nil {
		return nil
	}
	return time.After(at.Sub(b.now()))
}

// pollTime returns how long the proxy waits for messages: the time left to the
// deadline minus half the client's request timeout, within 5 to 20 s; false if the
// deadline leaves less than 5 s.
func pollTime(ctx context.Context, req *v2.ReceiveMessageRequest, settings *v2.Settings) (time.Duration, bool) {
	deadline, _ := ctx.Deadline()
	left := time.Until(deadline)
	poll := left - settings.GetRequestTimeout().AsDuration()/2
	if req.GetLongPollingTimeout() != nil {
		poll = req.GetLongPollingTimeout().AsDuration()
	}
	poll = min(max(poll, minPoll), maxPoll)
	if poll > left {
		return left, left >= minPoll
	}
	return poll, true
}

func checkInvisible(d, least time.Duration) *v2.Status {
	switch {
	case d < least:
		return result(v2.Code_ILLEGAL_INVISIBLE_TIME, fmt.Sprintf("the invisibleTime is too small. min is %d", least.Milliseconds()))
	case d > maxInvisible:
		return result(v2.Code_ILLEGAL_INVISIBLE_TIME, fmt.Sprintf("the invisibleTime is too large. max is %d", maxInvisible.Milliseconds()))
	}
	return nil
}

// filter returns the test of a tag expression: "*", "" or "a || b".
func filter(f *v2.FilterExpression) (func(string) bool, *v2.Status) {
	if f.GetType() == v2.FilterType_SQL {
		return nil, result(v2.Code_ILLEGAL_FILTER_EXPRESSION, "SQL filters are not supported")
	}
	expr := strings.TrimSpace(f.GetExpression())
	if expr == "" || expr == "*" {
		return func(string) bool { return true }, nil
	}
	tags := make(map[string]bool)
	for tag := range strings.SplitSeq(expr, "||") {
		if tag = strings.TrimSpace(tag); tag != "" {
			tags[tag] = true
		}
	}
	return func(tag string) bool { return tags[tag] }, nil
}

// frames makes the answer of a Receive that found something. The caller holds mu.
func (b *Broker) frames(taken []*delivery, req *v2.ReceiveMessageRequest) []*v2.ReceiveMessageResponse {
	frames := []*v2.ReceiveMessageResponse{statusFrame(result(v2.Code_OK, ""))}
	for _, d := range taken {
		frames = append(frames, &v2.ReceiveMessageResponse{Content: &v2.ReceiveMessageResponse_Message{
			Message: d.wire(req.GetMessageQueue().GetTopic()),
		}})
	}
	return append(frames, &v2.ReceiveMessageResponse{Content: &v2.ReceiveMessageResponse_DeliveryTimestamp{
		DeliveryTimestamp: timestamppb.New(b.now()),
	}})
}

// wire returns d in the form of the protocol.
func (d *delivery) wire(topic *v2.Resource) *v2.Message {
	m := d.msg
	sum := md5.Sum(m.Body) //nolint:gosec // the protocol's body digest
	// A timed message is stored a second time, as an ordinary one, when its timer fires.
	storedAt := m.StoredAt
	if !m.due.IsZero() {
		storedAt = m.due
	}
	sys := &v2.SystemProperties{
		Keys:            m.Keys,
		MessageId:       m.ID,
		BodyDigest:      &v2.Digest{Type: v2.DigestType_MD5, Checksum: strings.ToUpper(hex.EncodeToString(sum[:]))},
		BodyEncoding:    v2.Encoding_IDENTITY,
		BornHost:        m.system.GetBornHost(),
		StoreTimestamp:  timestamppb.New(storedAt),
		StoreHost:       brokerName,
		ReceiptHandle:   proto.String(d.handle()),
		QueueId:         wireInt(m.queue),
		QueueOffset:     proto.Int64(m.offset),
		DeliveryAttempt: proto.Int32(wireInt(d.attempt)),
		MessageGroup:    m.system.MessageGroup,
		TraceContext:    m.system.TraceContext,
		MessageType:     v2.MessageType_NORMAL,
	}
	if e := m.system.GetBodyEncoding(); e != v2.Encoding_ENCODING_UNSPECIFIED {
		sys.BodyEncoding = e
	}
	if m.Tag != "" {
		sys.Tag = proto.String(m.Tag)
	}
	if !m.BornAt.IsZero() {
		sys.BornTimestamp = timestamppb.New(m.BornAt)
	}
	if !m.DeliverAt.IsZero() {
		sys.MessageType = v2.MessageType_DELAY
		sys.DeliveryTimestamp = timestamppb.New(m.DeliverAt)
	}
	return &v2.Message{Topic: topic, Body: m.Body, UserProperties: m.Properties, SystemProperties: sys}
}
