package lapsetest

import (
	"context"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

// QueryRoute answers with the topic's queues, all on the one broker, whose
// endpoints are those by which the client came.
func (s *service) QueryRoute(_ context.Context, req *v2.QueryRouteRequest) (*v2.QueryRouteResponse, error) {
	b := s.b
	b.mu.Lock()
	defer b.mu.Unlock()
	name := nameOf(req.GetTopic())
	t, st := b.findTopic(req.GetTopic())
	if since, ok := b.missing[name]; ok && b.now().Sub(since) < b.opts.routeCache {
		st = result(v2.Code_TOPIC_NOT_FOUND, "no topic route info of "+name)
	} else if st.GetCode() == v2.Code_TOPIC_NOT_FOUND {
		b.missing[name] = b.now()
	}
	if st != nil {
		return &v2.QueryRouteResponse{Status: st}, nil
	}
	endpoints := req.GetEndpoints()
	if len(endpoints.GetAddresses()) == 0 {
		endpoints = b.endpoints()
	}
	queues := make([]*v2.MessageQueue, t.queues)
	for i := range queues {
		queues[i] = &v2.MessageQueue{
			Topic:              req.GetTopic(),
			Id:                 wireInt(i),
			Permission:         v2.Permission_READ_WRITE,
			Broker:             &v2.Broker{Name: brokerName, Endpoints: endpoints},
			AcceptMessageTypes: []v2.MessageType{t.typ.messageType()},
		}
	}
	return &v2.QueryRouteResponse{Status: result(v2.Code_OK, ""), MessageQueues: queues}, nil
}
